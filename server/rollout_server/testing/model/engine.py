"""The engine of the strict trainer: verifies one request and returns one completion or one failure. No HTTP and no gRPC."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from rollout_server.testing.checks.judge import ROLLOUTS_KEPT, RequestJudge
from rollout_server.testing.checks.renderer import UnrenderableError
from rollout_server.testing.checks.turn import CheckedPrompt, CompletionCall, ScriptedCompletion
from rollout_server.testing.model.calculator import Model
from rollout_server.testing.script import Fault, FaultKind, Line, Script, ScriptedReply


@dataclass(frozen=True, slots=True)
class CompletedCall:
    """A completion that counts, and its scripted reply. `lost`: the fault that loses the response; None: it is sent."""

    completion: ScriptedCompletion
    reply: ScriptedReply
    lost: Fault | None = None


@dataclass(frozen=True, slots=True)
class FailedCall:
    """A scripted failure. `completion` fills the failures that look like a completion; it does not count."""

    completion: ScriptedCompletion
    fault: Fault


Result: TypeAlias = CompletedCall | FailedCall


class Scripts:
    """The script of each rollout: its own, or the one for all others. May be read from any thread."""

    def __init__(self, scripts: Mapping[str, Script], other: Script) -> None:
        self._scripts = dict(scripts)
        self._other = other

    def of(self, rollout_id: str) -> Script:
        """Return the script of a rollout."""
        return self._scripts.get(rollout_id, self._other)

    def put(self, rollout_id: str, script: Script) -> None:
        """Set the script of a rollout."""
        self._scripts[rollout_id] = script


class Engine:
    """Combines judge, scripts and model for all protocols. Use it in one thread only.

    With `replays_keys` a turn that is requested again under its key gets the same completion; otherwise it is generated again.
    """

    def __init__(self, judge: RequestJudge, model: Model, scripts: Scripts, *, replays_keys: bool = False) -> None:
        self._judge = judge
        self._model = model
        self._scripts = scripts
        self._replays_keys = replays_keys
        self._lines_used: dict[str, int] = {}
        self._last: dict[str, CompletedCall] = {}

    def complete(self, call: CompletionCall) -> Result:
        """Verify a request and execute the next line of its script. Raises RefusedError for a wrong request, which uses no line."""
        prompt = self._judge.check(call)
        known = self._last.get(call.key)
        if prompt.repeats and self._replays_keys and known:
            self._judge.record_replay(prompt)
            return replace(known, reply=replace(known.reply, delay=0.0), lost=None)
        line: Line = self._next_line(call)
        lost = line if isinstance(line, Fault) and line.kind is FaultKind.LOST else None
        if lost:
            line = self._next_line(call)
        if isinstance(line, Fault):
            return self._fail(prompt, line)
        reply = self._scripts.of(call.rollout_id).extensions.apply_to(line, prompt.turn)
        try:
            completion = self._judge.accept(prompt, reply, fault=lost.kind.value if lost else "")
        except UnrenderableError as error:
            return self._fail(prompt, Fault.error(500, f"this template cannot render the scripted reply: {error}"))
        completed = CompletedCall(completion, reply, lost)
        self._remember(call.key, completed)
        return completed

    def put_script(self, rollout_id: str, script: Script) -> None:
        """Set the script of a rollout and discard the rollout's state: the next request gets the first line."""
        self._judge.start_anew(rollout_id)
        self._lines_used.pop(rollout_id, None)
        self._scripts.put(rollout_id, script)

    def _next_line(self, call: CompletionCall) -> Line:
        used = self._lines_used.get(call.rollout_id, 0)
        line = self._scripts.of(call.rollout_id).line(used)
        if line is None:
            return self._model.reply(call.messages)
        self._lines_used[call.rollout_id] = used + 1
        return line

    def _remember(self, key: str, completed: CompletedCall) -> None:
        self._last.pop(key, None)
        self._last[key] = completed
        while len(self._last) > ROLLOUTS_KEPT:
            del self._last[next(iter(self._last))]

    def _fail(self, prompt: CheckedPrompt, fault: Fault) -> FailedCall:
        what = f"{fault.kind} {fault.status}" if fault.kind is FaultKind.STATUS else fault.kind.value
        self._judge.record_fault(prompt, what)
        if fault.kind in (FaultKind.EMPTY_CHOICES, FaultKind.NULL_MESSAGE):
            return FailedCall(self._judge.completion(prompt, ScriptedReply(content="")), fault)
        return FailedCall(ScriptedCompletion({}, "stop", [], [], prompt.ids), fault)

"""A judged, scripted model: one call in, one answer or one failure out. No HTTP and no gRPC."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from rollout_server.testing.calculator_model import Model
from rollout_server.testing.call import Answer, Call, Prompt
from rollout_server.testing.judge import Judge
from rollout_server.testing.renderer import UnrenderableError
from rollout_server.testing.script import Fault, FaultKind, Line, Reply, Script


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer that counts, and the line of the script that it came from."""

    answer: Answer
    reply: Reply


@dataclass(frozen=True, slots=True)
class Failed:
    """A failure to commit. `answer` is what stands in those that look like completions; it does not count."""

    answer: Answer
    fault: Fault


Result: TypeAlias = Answered | Failed


class Engine:
    """The judge, the scripts and the model behind both wires. For one thread, except for `put_script`."""

    def __init__(self, judge: Judge, model: Model, scripts: Mapping[str, Script]) -> None:
        self._judge = judge
        self._model = model
        self._scripts = dict(scripts)
        self._said: dict[str, int] = {}

    def complete(self, call: Call) -> Result:
        """Judges the call and says the next line; RefusedError for a call that is wrong, which uses up no line."""
        prompt = self._judge.check(call)
        line = self._next_line(call)
        if isinstance(line, Fault):
            return self._fail(prompt, line)
        try:
            return Answered(self._judge.accept(prompt, line), line)
        except UnrenderableError as error:
            return self._fail(prompt, Fault.error(500, f"the scripted reply is not one for this template: {error}"))

    def put_script(self, rollout_id: str, script: Script) -> None:
        """From now on this rollout follows `script`, from its first line, and its next call is a first one."""
        self._judge.start_anew(rollout_id)
        self._said.pop(rollout_id, None)
        self._scripts[rollout_id] = script

    def _next_line(self, call: Call) -> Line:
        script = self._scripts.get(call.rollout_id)
        if script is None:
            return self._model.reply(call.messages)
        said = self._said.get(call.rollout_id, 0)
        self._said[call.rollout_id] = said + 1
        return script.line(said)

    def _fail(self, prompt: Prompt, fault: Fault) -> Failed:
        what = f"{fault.kind} {fault.status}" if fault.kind is FaultKind.STATUS else fault.kind.value
        self._judge.record_fault(prompt, what)
        if fault.kind in (FaultKind.EMPTY_CHOICES, FaultKind.NULL_MESSAGE):
            return Failed(self._judge.answer(prompt, Reply(content="")), fault)
        return Failed(Answer({}, "stop", [], [], prompt.ids), fault)

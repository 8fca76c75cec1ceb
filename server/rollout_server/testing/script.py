"""Scripts of a strict trainer: its completions and its failures, as frozen values.

A `Script` defines how a trainer treats one rollout. Its lines are used one per request: a `ScriptedReply` is rendered, counted and
sent; a `Fault` makes the request fail. A request that the judge refuses uses no line.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

Json: TypeAlias = Mapping[str, object]
"""A JSON object, passed on verbatim with all its keys in their order."""

OMITTABLE: Final = frozenset({"token_ids", "logprobs", "prompt_token_ids"})
"""Fields of a completion beyond OpenAI's that `ScriptedReply.omit` can leave out."""


def tool_call(call_id: str, name: str, arguments: str | Json) -> Json:
    """Return an OpenAI tool call. `arguments` is JSON text or an object, and is sent as given."""
    given = arguments if isinstance(arguments, str) else dict(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}


class Lie(StrEnum):
    """A deliberate error in a gRPC trainer's response. The trainer's own ledger stays correct.

    A correct server ends the rollout in the turn of the lie, with an error that names the turn and the mismatch. It adds nothing
    of the completion to a sample, and its other rollouts continue. If the server misses the lie, its base in the next turn is a
    LEDGER_MISMATCH for `CHANGED_ID`, `DROPPED_ID`, `OTHER_TURN` and `OVERSIZED_ID`. Lies exist over gRPC only.
    """

    CHANGED_ID = "changed_id"
    """One of `token_ids` is changed. Their digest differs from `after`: the server must compute it before it accepts the ids."""
    DROPPED_ID = "dropped_id"
    """One of `token_ids` and its logprob are missing. `after` counts one token more and has another digest."""
    OVERSIZED_ID = "oversized_id"
    """One of `token_ids` is 2^31 or more. token.proto forbids this, because it would set the author bit in a digest."""
    SHORT_LOGPROBS = "short_logprobs"
    """`logprobs` has one value less than `token_ids`. All digests are correct: the server must compare the lengths."""
    TOO_LONG = "too_long"
    """The completion has one token more than `sampling.max_tokens` and is otherwise correct: the server must count. Token mode
    only; without `max_tokens` the response is honest."""
    OTHER_TURN = "other_turn"
    """Message, text, ids and logprobs are those of an earlier turn, with the checkpoints of this turn. The digest of prompt and
    ids differs from `after`."""
    REPLAYED_TURN = "replayed_turn"
    """The whole response is that of an earlier turn, including its checkpoints. `prompt_checkpoint` differs from the request; in
    message mode the prompt is an older one."""
    STALE_POLICY = "stale_policy"
    """`policy_version` is an outdated one: ``policy-(N-2)`` in turn N (``policy-0`` in the first two). The tokens are correct: the
    server must notice that a rollout's versions go backwards."""
    PROMPT_DIGEST = "prompt_digest"
    """The digest of `prompt_checkpoint` differs from the `after` of the request. Token mode only."""
    AFTER_DIGEST = "after_digest"
    """The digest of `after` differs from that of prompt and `token_ids`."""
    ANSWERED_TWICE = "answered_twice"
    """The honest completion is followed by a second one for the same turn, with one id changed. Only on a stream, where the server
    must ignore it; a unary call has only one response."""
    NO_CHECKPOINTS = "no_checkpoints"
    """`prompt_checkpoint` and `after` are unset. In token mode nothing proves what the model saw, so the server must refuse the
    completion. In message mode only `after` is missing, and the server takes the ids as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedReply:
    """One completion of the scripted model.

    Args:
        tool_calls, extra: copied into the message verbatim.
        cut: the completion has no stop token.
        surplus: ids, or text for the trainer to encode, appended to the ids of the rendered reply. They count as generated tokens.
        omit, usage, override: change top-level fields of the response after counting. `usage` adds the token counts of prompt
            and completion as ``usage``.
        delay: seconds before the response is sent.
        lie: over gRPC only: an error in the response.
        policy_version: over gRPC only; by default ``policy-N`` in turn N.
        policy_step: over gRPC only: the step of the policy; None: it is not sent.
        aborts: over gRPC only: numbers of tokens after which the completion is aborted. `(3, 0)` returns 3 tokens, then none, then
            the rest. Each further part has a further version and step.
        forgets: over gRPC only: after this reply the trainer knows no base and no tools of the rollout, until it receives the
            whole history.

    Raises ValueError for a negative delay or an unknown name in `omit`.
    """

    content: str | Sequence[object] | None = None
    reasoning: str | None = None
    tool_calls: tuple[Json, ...] = ()
    extra: Json = field(default_factory=dict)
    finish_reason: str | None = None
    cut: bool = False
    surplus: tuple[int, ...] | str = ()
    omit: frozenset[str] = frozenset()
    usage: bool = False
    override: Json = field(default_factory=dict)
    delay: float = 0.0
    lie: Lie | None = None
    policy_version: str | None = None
    policy_step: int | None = None
    aborts: tuple[int, ...] = ()
    forgets: bool = False

    def __post_init__(self) -> None:
        _check_omitted(self.omit)
        _check_delay(self.delay)

    @property
    def message(self) -> dict[str, object]:
        """The assistant message. `content` is always present and may be null; other keys are present only if set."""
        message: dict[str, object] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        return message | dict(self.extra)

    @property
    def finish(self) -> str:
        """`finish_reason`; by default that of an engine: `length` for a reply that was cut, else `stop`."""
        return self.finish_reason or ("length" if self.cut else "stop")


class FaultKind(StrEnum):
    """The ways in which a trainer fails."""

    STATUS = "status"
    """Any status with any complete body: an error, an HTML page, broken JSON."""
    RESET = "reset"
    """The connection is reset before a response is sent."""
    CLOSED = "closed"
    """The connection is closed normally before a response is sent."""
    LOST = "lost"
    """The next line is generated and counts, but the connection is closed before it is sent."""
    SILENCE = "silence"
    """No response until the caller gives up or the trainer is closed."""
    TRUNCATED = "truncated"
    """The connection is closed in the middle of the body."""
    EMPTY_CHOICES = "empty_choices"
    """A completion whose list of choices is empty."""
    NULL_MESSAGE = "null_message"
    """A completion whose message is null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One failure, after `delay` seconds.

    The turn does not count: the rollout's state does not change, and the same request is correct again. The kinds `STATUS` and
    `TRUNCATED` use `status`, `body` (sent verbatim) and `headers`. Raises ValueError for a negative delay.
    """

    kind: FaultKind
    status: int = 200
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    delay: float = 0.0

    def __post_init__(self) -> None:
        _check_delay(self.delay)

    @classmethod
    def error(cls, status: int, detail: str, headers: Mapping[str, str] | None = None) -> "Fault":
        """Return an HTTP error with the body ``{"detail": detail}``, as trainers send it."""
        body = json.dumps({"detail": detail})
        return cls(
            kind=FaultKind.STATUS,
            status=status,
            body=body,
            headers={"content-type": "application/json", **(headers or {})},
        )

    @classmethod
    def raw(cls, body: str, content_type: str = "application/json") -> "Fault":
        """Return a response with status 200 whose body is not a completion."""
        return cls(kind=FaultKind.STATUS, body=body, headers={"content-type": content_type})

    @classmethod
    def truncated(cls, body: str = '{"id": "x"') -> "Fault":
        """Return the beginning of a response that is shorter than its Content-Length."""
        return cls(kind=FaultKind.TRUNCATED, body=body, headers={"content-type": "application/json"})


Line: TypeAlias = ScriptedReply | Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Extensions:
    """Changes to the fields of a rollout's completions beyond OpenAI's, in the given `turns` (from 1), or in all turns if None.

    `omit` and `usage` are as in `ScriptedReply` and add to those of each reply. Raises ValueError for an unknown name in `omit`.
    """

    omit: frozenset[str] = frozenset()
    usage: bool = False
    turns: frozenset[int] | None = None

    def __post_init__(self) -> None:
        _check_omitted(self.omit)

    def apply_to(self, reply: ScriptedReply, turn: int) -> ScriptedReply:
        """Return the reply as it is sent in this turn."""
        if self.turns is not None and turn not in self.turns:
            return reply
        return dataclasses.replace(reply, omit=reply.omit | self.omit, usage=reply.usage or self.usage)


@dataclass(frozen=True, slots=True)
class Reception:
    """How a trainer responds to the deliveries of a rollout's outcome: each with the next fault, and then with status 200.

    With `repeat_last` the last fault is repeated for all further deliveries. A status of 2xx acknowledges. A fault that breaks the
    connection means that the outcome was received and the acknowledgement is lost. Raises ValueError for kinds that apply to
    completions only, and for `repeat_last` without faults.
    """

    faults: tuple[Fault, ...] = ()
    repeat_last: bool = False

    def __post_init__(self) -> None:
        for fault in self.faults:
            if fault.kind in (FaultKind.EMPTY_CHOICES, FaultKind.NULL_MESSAGE):
                raise ValueError(f"{fault.kind} does not apply to the delivery of an outcome, only to completions")
        if self.repeat_last and not self.faults:
            raise ValueError("repeat_last needs at least one fault")

    def fault(self, index: int) -> Fault | None:
        """Return the fault for the delivery at `index`, from 0; None: acknowledge it with 200."""
        if index < len(self.faults):
            return self.faults[index]
        return self.faults[-1] if self.repeat_last else None


@dataclass(frozen=True, slots=True)
class Script:
    """How a trainer treats one rollout: the lines in order, changes to their fields, and the responses to its outcome.

    After the last line, `repeat_last` repeats it and `then_model` uses the trainer's model. With neither, a further request gets an
    HTTP 500 that names the script's length, which reveals a server that requests too many turns. Raises ValueError for both
    flags at once, and for a script without lines unless `then_model` is set.
    """

    lines: tuple[Line, ...] = ()
    repeat_last: bool = False
    then_model: bool = False
    extensions: Extensions = field(default_factory=Extensions)
    reception: Reception = field(default_factory=Reception)

    def __post_init__(self) -> None:
        if not self.lines and not self.then_model:
            raise ValueError("a script needs at least one line, or then_model")
        if self.repeat_last and self.then_model:
            raise ValueError("repeat_last and then_model exclude each other")

    def line(self, index: int) -> Line | None:
        """Return the line at `index`, from 0; None if the model generates the completion."""
        if index < len(self.lines):
            return self.lines[index]
        if self.then_model:
            return None
        if self.repeat_last:
            return self.lines[-1]
        return Fault.error(500, f"the script has {len(self.lines)} lines, and all of them were used")


def _check_omitted(names: frozenset[str]) -> None:
    if unknown := names - OMITTABLE:
        raise ValueError(f"omit names {sorted(unknown)}; only {sorted(OMITTABLE)} can be left out")


def _check_delay(seconds: float) -> None:
    if seconds < 0:
        raise ValueError(f"delay is {seconds} seconds, it cannot be negative")

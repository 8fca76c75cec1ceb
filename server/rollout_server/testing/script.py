"""What a scripted model says, and how a scripted trainer fails: frozen values.

A `Script` is how a trainer treats one rollout, first of all its list of lines. A line is a `ScriptedReply`, which the trainer
renders, counts and sends, or a `Fault`, which it commits instead of answering. A call that the judge refuses uses up no line.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

Json: TypeAlias = Mapping[str, object]
"""A JSON object, kept verbatim: key order, and whatever keys there are."""

OMITTABLE: Final = frozenset({"token_ids", "logprobs", "prompt_token_ids"})
"""The extensions of a completion that `ScriptedReply.omit` can leave out."""


def tool_call(call_id: str, name: str, arguments: str | Json) -> Json:
    """One OpenAI tool call; `arguments` as JSON text or as an object, whichever the scripted model is to send."""
    sent = arguments if isinstance(arguments, str) else dict(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": sent}}


class Lie(StrEnum):
    """What a gRPC trainer tells of an answer that is not so. Its own ledger holds the truth.

    An honest server ends the rollout on the turn of the lie with an error that names the turn and what does not agree,
    takes nothing of the answer into a sample, and goes on with all other rollouts. Where it does not notice, the next
    turn's base is a LEDGER_MISMATCH for the first two, for `OTHER_TURN` and for `OVERSIZED_ID`. Over HTTP no lie is told.
    """

    CHANGED_ID = "changed_id"
    """One of `token_ids` is another. Their digest is not that of `after`: the server has to compute it before it believes
    the ids."""
    DROPPED_ID = "dropped_id"
    """One of `token_ids` is missing, with its logprob. `after` has one token more, and another digest."""
    OVERSIZED_ID = "oversized_id"
    """One of `token_ids` is 2^31 or more, which token.proto forbids: it would set the author's bit in a digest."""
    SHORT_LOGPROBS = "short_logprobs"
    """`logprobs` has one value less than `token_ids`. All digests are right: the server has to compare the lengths."""
    TOO_LONG = "too_long"
    """The answer has one token more than `sampling.max_tokens`, else everything is right: the server has to count. In
    token mode only, and honest where no `max_tokens` came."""
    OTHER_TURN = "other_turn"
    """Message, text, ids and logprobs are those of an earlier answer, the checkpoints those of this turn. The digest of
    prompt and ids is not that of `after`."""
    REPLAYED_TURN = "replayed_turn"
    """The earlier answer as a whole, checkpoints included. `prompt_checkpoint` is not what was asked for; in message mode
    the prompt is an older one."""
    STALE_POLICY = "stale_policy"
    """`policy_version` is one that was replaced already: ``policy-(N-2)`` in turn N (``policy-0`` in the first two). The
    tokens are right; the server has to see that a rollout's versions do not go back."""
    PROMPT_DIGEST = "prompt_digest"
    """`prompt_checkpoint` has another digest than the `after` of the request. In token mode only."""
    AFTER_DIGEST = "after_digest"
    """`after` has another digest than prompt and `token_ids` give."""
    ANSWERED_TWICE = "answered_twice"
    """A second answer to the same turn follows the honest one, with one id changed. Over a stream only, where the contract has it
    ignored; elsewhere a call has one answer."""
    NO_CHECKPOINTS = "no_checkpoints"
    """`prompt_checkpoint` and `after` are unset: in token mode nothing proves what the model saw, and an answer without
    proof is no answer. In message mode only `after` is missing, and the ids that came are the truth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedReply:
    """One answer of the model.

    `tool_calls` and `extra` go into the message verbatim. A reply that was `cut` has no end token, and `surplus` (ids, or
    text for the trainer to encode) is appended to the ids that the reply's text renders to; both are part of what the
    trainer counts with afterwards. `omit`, `usage` (adds the counts of prompt and answer as ``usage``) and `override` change
    the response's top-level fields only, after counting. The answer goes out after `delay` seconds. ValueError for a negative
    delay or an unknown name in `omit`.

    Over gRPC only: `lie` is told of the answer; `policy_version` is who sampled it, by default ``policy-N`` in turn N; and a
    trainer that `forgets` after answering knows no base of the rollout, and none of its tools, until it is sent the whole
    history.
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
    forgets: bool = False

    def __post_init__(self) -> None:
        _check_omitted(self.omit)
        _check_delay(self.delay)

    @property
    def message(self) -> dict[str, object]:
        """The assistant message. `content` is always there, if only as null; other keys only where they say something."""
        message: dict[str, object] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        return message | dict(self.extra)

    @property
    def finish(self) -> str:
        """`finish_reason`, or what an engine reports without one: `length` for a reply that was cut, else `stop`."""
        return self.finish_reason or ("length" if self.cut else "stop")


class FaultKind(StrEnum):
    """The ways in which a trainer fails to answer."""

    STATUS = "status"
    """Any status with any body, whole: an error, an HTML page, broken JSON."""
    RESET = "reset"
    """The connection is reset before anything was answered."""
    CLOSED = "closed"
    """The connection is closed in good order before anything was answered."""
    LOST = "lost"
    """What the next line says is generated and counts, but the connection is closed without it."""
    SILENCE = "silence"
    """No answer, until the caller gives up or the trainer is closed."""
    TRUNCATED = "truncated"
    """The connection is closed in the middle of the body."""
    EMPTY_CHOICES = "empty_choices"
    """A completion whose list of choices is empty."""
    NULL_MESSAGE = "null_message"
    """A completion whose message is null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One failure to answer, after `delay` seconds.

    The turn does not count as answered: the rollout's state stays what it was, and the same call is right again.
    `status`, `body` and `headers` are used by the kinds `STATUS` and `TRUNCATED`, which send `body` verbatim.
    ValueError for a negative delay.
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
        """An HTTP error in the form in which trainers send it, ``{"detail": detail}``."""
        body = json.dumps({"detail": detail})
        return cls(
            kind=FaultKind.STATUS,
            status=status,
            body=body,
            headers={"content-type": "application/json", **(headers or {})},
        )

    @classmethod
    def raw(cls, body: str, content_type: str = "application/json") -> "Fault":
        """Status 200 with a body that is no completion."""
        return cls(kind=FaultKind.STATUS, body=body, headers={"content-type": content_type})

    @classmethod
    def truncated(cls, body: str = '{"id": "x"') -> "Fault":
        """The beginning of an answer whose Content-Length promised more."""
        return cls(kind=FaultKind.TRUNCATED, body=body, headers={"content-type": "application/json"})


Line: TypeAlias = ScriptedReply | Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Extensions:
    """What becomes of the extensions of a rollout's answers, in the given `turns` (from 1) or, with None, in all of them.

    `omit` and `usage` are those of `ScriptedReply`, and add to what a reply says itself. ValueError for an unknown name in `omit`.
    """

    omit: frozenset[str] = frozenset()
    usage: bool = False
    turns: frozenset[int] | None = None

    def __post_init__(self) -> None:
        _check_omitted(self.omit)

    def apply_to(self, reply: ScriptedReply, turn: int) -> ScriptedReply:
        """The reply as it goes out in this turn."""
        if self.turns is not None and turn not in self.turns:
            return reply
        return dataclasses.replace(reply, omit=reply.omit | self.omit, usage=reply.usage or self.usage)


@dataclass(frozen=True, slots=True)
class Reception:
    """How the deliveries of a rollout's outcome are met: each with the next fault, and after them with status 200.

    With `repeat_last` the last fault is committed for ever. A status of 2xx acknowledges; every kind of broken connection
    means that the outcome was taken and the acknowledgement got lost. ValueError for the kinds that only completions know,
    and for a last fault to repeat where there is none.
    """

    faults: tuple[Fault, ...] = ()
    repeat_last: bool = False

    def __post_init__(self) -> None:
        for fault in self.faults:
            if fault.kind in (FaultKind.EMPTY_CHOICES, FaultKind.NULL_MESSAGE):
                raise ValueError(f"{fault.kind} is no way to meet the delivery of an outcome")
        if self.repeat_last and not self.faults:
            raise ValueError("there is no last fault to repeat")

    def fault(self, index: int) -> Fault | None:
        """What is committed at the delivery at `index`, counted from 0; None: it is acknowledged with 200."""
        if index < len(self.faults):
            return self.faults[index]
        return self.faults[-1] if self.repeat_last else None


@dataclass(frozen=True, slots=True)
class Script:
    """How a trainer treats one rollout: its lines in order, what they are sent with, and how its outcome is met.

    With `repeat_last` the last line is said again for ever; with `then_model` the trainer's model speaks after the last
    line. Without either a call beyond the last line is an HTTP 500 that names the script's length, so that a server asking
    too often is noticed. ValueError for a script without lines that does not leave them to the model, and for both at once.
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
            raise ValueError("after the last line it is repeat_last or then_model, not both")

    def line(self, index: int) -> Line | None:
        """The line at `index`, counted from 0; None where the model speaks."""
        if index < len(self.lines):
            return self.lines[index]
        if self.then_model:
            return None
        if self.repeat_last:
            return self.lines[-1]
        return Fault.error(500, f"the script has {len(self.lines)} lines and all of them were said")


def _check_omitted(names: frozenset[str]) -> None:
    if unknown := names - OMITTABLE:
        raise ValueError(f"omit names {sorted(unknown)}; only {sorted(OMITTABLE)} can be left out")


def _check_delay(seconds: float) -> None:
    if seconds < 0:
        raise ValueError(f"delay is {seconds} seconds, it cannot be negative")

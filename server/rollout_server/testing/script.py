"""What a scripted model says, and how a scripted trainer fails: frozen values.

A `Script` is the list of lines for one rollout. A line is a `Reply`, which the trainer renders, counts and sends, or a
`Fault`, which it commits instead of answering. A call that the judge refuses uses up no line.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

Json: TypeAlias = Mapping[str, object]
"""A JSON object, kept verbatim: key order, and whatever keys there are."""

OMITTABLE: Final = frozenset({"token_ids", "logprobs", "prompt_token_ids"})
"""The extensions of a completion that `Reply.omit` can leave out."""


def tool_call(call_id: str, name: str, arguments: str | Json) -> Json:
    """One OpenAI tool call; `arguments` as JSON text or as an object, whichever the scripted model is to send."""
    sent = arguments if isinstance(arguments, str) else dict(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": sent}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer of the model.

    `tool_calls` and `extra` go into the message verbatim. A reply that was `cut` has no end token, and `surplus` (ids, or
    text for the trainer to encode) is appended to the ids that the reply's text renders to; both are part of what the
    trainer counts with afterwards. `omit` and `override` change the response's top-level fields only, after counting.
    The answer goes out after `delay` seconds. ValueError for a negative delay or an unknown name in `omit`.
    """

    content: str | Sequence[object] | None = None
    reasoning: str | None = None
    tool_calls: tuple[Json, ...] = ()
    extra: Json = field(default_factory=dict)
    finish_reason: str | None = None
    cut: bool = False
    surplus: tuple[int, ...] | str = ()
    omit: frozenset[str] = frozenset()
    override: Json = field(default_factory=dict)
    delay: float = 0.0

    def __post_init__(self) -> None:
        if unknown := self.omit - OMITTABLE:
            raise ValueError(f"omit names {sorted(unknown)}; only {sorted(OMITTABLE)} can be left out")
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


Line: TypeAlias = Reply | Fault


@dataclass(frozen=True, slots=True)
class Script:
    """The lines of one rollout, in order.

    With `repeat_last` the last line is said again for ever. Without it a call beyond the last line is an HTTP 500 that
    names the script's length, so that a server asking too often is noticed. ValueError for a script without lines.
    """

    lines: tuple[Line, ...]
    repeat_last: bool = False

    def __post_init__(self) -> None:
        if not self.lines:
            raise ValueError("a script needs at least one line")

    def line(self, index: int) -> Line:
        """The line at `index`, counted from 0."""
        if index < len(self.lines):
            return self.lines[index]
        if self.repeat_last:
            return self.lines[-1]
        return Fault.error(500, f"the script has {len(self.lines)} lines and all of them were said")


def _check_delay(seconds: float) -> None:
    if seconds < 0:
        raise ValueError(f"delay is {seconds} seconds, it cannot be negative")

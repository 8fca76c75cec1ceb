"""The messages that an agent reads and writes: replies, the conversation (read-only), and what it appends, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from rollout_server.core.message import JSON, MalformedMessage, Message, ToolCall, tool_calls
from rollout_server.core.outcome import Category, Failure
from rollout_server.core.record import Answered, DriftFound, Record
from rollout_server.runtime.errors import AgentMistake, RolloutFailed


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of the model: the message as it came, its tool calls, the trainer's word for why it ended, and its turn.

    `sampled` is the record of it, if there is one.
    """

    message: Mapping[str, JSON]
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    turn: int = 0
    sampled: Answered | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, answered: Answered) -> Reply:
        """The reply of an answer. Raises `RolloutFailed` for a message that cannot be read."""
        turn = answered.turn
        try:
            fields = answered.message.fields()
            return cls(fields, tool_calls(fields), answered.finish_reason, turn, answered)
        except MalformedMessage as error:
            text = f"turn {turn}: the trainer's message is malformed: {error}"
            raise RolloutFailed(Failure(Category.VALIDATION, text, turn)) from None

    @property
    def content(self) -> str:
        """The text of the message; text parts are joined."""
        return text_of(self.message.get("content"))

    @property
    def token_ids(self) -> Sequence[int] | None:
        """The tokens that were sampled, copied at each look; None where the trainer sent none."""
        ids = self.sampled.token_ids if self.sampled is not None else None
        return None if ids is None else ids.tolist()

    @property
    def logprobs(self) -> Sequence[float] | None:
        """Their logprobs, one for each, copied at each look; None where the trainer sent none that fit."""
        logprobs = self.sampled.logprobs if self.sampled is not None else None
        return None if logprobs is None else logprobs.tolist()


def text_of(content: JSON) -> str:
    """The text of a message's content: a string, or the text parts of a list."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = (part.get("text") for part in content if isinstance(part, Mapping))
    return "".join(text for text in texts if isinstance(text, str))


def drift_failure(logged: Iterable[Record]) -> Failure | None:
    """How a rollout fails that takes no drift, if an answer showed some."""
    for record in logged:
        if isinstance(record, DriftFound):
            drift = record.drift
            text = (
                f"{record.text}. It has {drift.reported} tokens, {drift.expected} were expected: its template, tools or "
                'tokenizer differ from ours; with on_drift "warn" the rollout goes on in a new segment'
            )
            return Failure(Category.TOKEN_DRIFT, text, record.turn)
    return None


def checked_messages(messages: Iterable[Mapping[str, JSON]]) -> tuple[Message, ...]:
    """An agent's messages as the conversation holds them. Raises `AgentMistake`."""
    try:
        return tuple(Message.write(message) for message in messages)
    except (MalformedMessage, TypeError, ValueError) as error:
        raise AgentMistake(f"not a message: {error}") from error


_ADVICE = (
    "what was said stays: run.messages is only read. `await run.append(...)` adds to the conversation, and `await run.fork([...], "
    'kind="compaction")` goes on with another one in its place; `[*run.messages]` is a list of your own'
)


def _refuse(*_arguments: object, **_named: object) -> NoReturn:
    raise AgentMistake(_ADVICE)


class ReadList(list[Any]):
    """A list for everybody who reads it. Copied, it is a plain one."""

    __slots__ = ()
    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce_ex__(self, _protocol: object) -> tuple[type[list[Any]], tuple[list[Any]]]:
        return list, ([*self],)


class ReadDict(dict[str, Any]):
    """A dictionary for everybody who reads it. Copied, it is a plain one."""

    __slots__ = ()
    update = setdefault = pop = popitem = clear = _refuse
    __setitem__ = __delitem__ = __ior__ = _refuse

    def __reduce_ex__(self, _protocol: object) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, ({**self},)


def read_only(value: Any) -> Any:
    """JSON as it is parsed, whose lists and dictionaries raise `AgentMistake` where somebody changes them."""
    if isinstance(value, dict):
        return ReadDict({key: read_only(item) for key, item in value.items()})
    if isinstance(value, list):
        return ReadList([read_only(item) for item in value])
    return value

"""Messages that an agent reads and writes: replies, and validated messages to append."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rollout_server.core.message import JSON, MalformedMessage, Message, ToolCall, tool_calls
from rollout_server.core.outcome import Category, Failure, FailureClass
from rollout_server.core.record import Answered, DriftFound, Record
from rollout_server.runtime.errors import AgentMistake, RolloutFailed


@dataclass(frozen=True, slots=True)
class Reply:
    """A completion: the parsed message, its tool calls, the trainer's finish reason, and the turn.

    `sampled` is the log record of the completion, if there is one.
    """

    message: Mapping[str, JSON]
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    turn: int = 0
    sampled: Answered | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, answered: Answered, source: FailureClass) -> Reply:
        """Return the reply for a logged completion. Raise `RolloutFailed` of the class `source` for a malformed message."""
        turn = answered.turn
        try:
            fields = answered.message.fields()
            return cls(fields, tool_calls(fields), answered.finish_reason, turn, answered)
        except MalformedMessage as error:
            text = f"turn {turn}: the completion's message is malformed: {error}"
            raise RolloutFailed(Failure(Category.VALIDATION, text, turn, source=source)) from None

    @property
    def content(self) -> str:
        """Text of the message; text parts are concatenated."""
        return text_of(self.message.get("content"))

    @property
    def token_ids(self) -> Sequence[int] | None:
        """Sampled token ids (int), copied at each access; None if the trainer sent none."""
        ids = self.sampled.token_ids if self.sampled is not None else None
        return None if ids is None else ids.tolist()

    @property
    def logprobs(self) -> Sequence[float] | None:
        """Logprobs (float), one per sampled token, copied at each access; None if the trainer sent none that match."""
        logprobs = self.sampled.logprobs if self.sampled is not None else None
        return None if logprobs is None else logprobs.tolist()


def text_of(content: JSON) -> str:
    """Return the text of a message's content: a string, or the concatenated text parts of a list."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = (part.get("text") for part in content if isinstance(part, Mapping))
    return "".join(text for text in texts if isinstance(text, str))


def drift_failure(logged: Iterable[Record], source: FailureClass) -> Failure | None:
    """Return the failure of a rollout with `on_drift: fail`, or None if the completion showed no drift.

    `source` is the class of the endpoint that reported the prompt.
    """
    for record in logged:
        if isinstance(record, DriftFound):
            drift = record.drift
            text = (
                f"{record.text}. It has {drift.reported} tokens, {drift.expected} were expected: its template, tools or "
                'tokenizer differ from the server\'s; with on_drift "warn" the rollout continues in a new segment'
            )
            return Failure(Category.TOKEN_DRIFT, text, record.turn, source=source)
    return None


def checked_messages(messages: Iterable[Mapping[str, JSON]]) -> tuple[Message, ...]:
    """Convert an agent's messages to the conversation's form. Raise `AgentMistake`."""
    messages = tuple(messages)
    if any(isinstance(message, list | tuple) for message in messages):
        raise AgentMistake("not a message, but a list; to append several messages, write `append(*messages)`")
    try:
        return tuple(Message.write(message) for message in messages)
    except (MalformedMessage, TypeError, ValueError) as error:
        raise AgentMistake(f"not a message: {error}") from error

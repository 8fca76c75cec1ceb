"""What an agent reads of an answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rollout_server.core.message import JSON, MalformedMessage, ToolCall, tool_calls
from rollout_server.core.outcome import Category, Failure
from rollout_server.core.record import Answered, DriftFound, Record
from rollout_server.runtime.ports import RolloutFailed


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

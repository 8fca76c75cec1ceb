"""What an agent reads of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollout_server.core.message import JSON, ToolCall


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of the model: the message as it came, its tool calls, the trainer's word for why it ended, and its turn."""

    message: Mapping[str, JSON]
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    turn: int = 0

    @property
    def content(self) -> str:
        """The text of the message; text parts are joined."""
        return text_of(self.message.get("content"))


def text_of(content: JSON) -> str:
    """The text of a message's content: a string, or the text parts of a list."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = (part.get("text") for part in content if isinstance(part, Mapping))
    return "".join(text for text in texts if isinstance(text, str))

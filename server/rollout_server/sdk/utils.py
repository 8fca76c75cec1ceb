"""Small functions for messages, stop sequences and options; the decorators for rewards also have this module in the earlier SDK."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rollout_server.runtime.run.messages import text_of
from rollout_server.sdk.rewards import osmosis_reward, osmosis_rubric

__all__ = [
    "count_messages_by_role",
    "get_message_content",
    "get_message_role",
    "is_assistant_message",
    "is_tool_message",
    "is_user_message",
    "normalize_stop",
    "osmosis_reward",
    "osmosis_rubric",
    "parse_tool_calls",
]


def parse_tool_calls(assistant_message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tool calls of an answer; an empty list where there are none, or no list of them."""
    calls = assistant_message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def normalize_stop(stop: Any) -> list[str] | None:
    """Stop sequences as a list of texts. A text becomes a list of it, members become texts; for anything else there are none."""
    if isinstance(stop, str):
        return [stop]
    return [str(each) for each in stop] if isinstance(stop, list | tuple) else None


def get_message_content(message: Mapping[str, Any]) -> str:
    """The text of a message; text parts are joined, and nothing reads as empty."""
    return text_of(message.get("content"))


def get_message_role(message: Mapping[str, Any]) -> str:
    """Its role; "unknown" where there is none."""
    role = message.get("role")
    return role if isinstance(role, str) else "unknown"


def is_assistant_message(message: Mapping[str, Any]) -> bool:
    """The model wrote it."""
    return message.get("role") == "assistant"


def is_tool_message(message: Mapping[str, Any]) -> bool:
    """It is a tool's result."""
    return message.get("role") == "tool"


def is_user_message(message: Mapping[str, Any]) -> bool:
    """A user wrote it."""
    return message.get("role") == "user"


def count_messages_by_role(messages: list[dict[str, Any]]) -> dict[str, int]:
    """How many messages there are of each role, in the order in which roles appear."""
    return dict(Counter(get_message_role(message) for message in messages))


def check_options(function: str, options: Mapping[str, object], kind: type[object]) -> None:
    """Raises TypeError for options that the function does not have, as Python would for parameters. `kind` lists those it has."""
    unknown = sorted(options.keys() - kind.__annotations__.keys())
    if unknown:
        raise TypeError(f"{function} takes no {', '.join(unknown)}; it takes {', '.join(kind.__annotations__)}")

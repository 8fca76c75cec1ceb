"""Helpers for messages, stop sequences and options. The reward decorators are here too, as in the earlier SDK."""

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
    """Return the tool calls of a message; an empty list if there are none or they are not a list."""
    calls = assistant_message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def normalize_stop(stop: Any) -> list[str] | None:
    """Return stop sequences as a list of strings, from a string or a list. Return None for anything else."""
    if isinstance(stop, str):
        return [stop]
    return [str(each) for each in stop] if isinstance(stop, list | tuple) else None


def get_message_content(message: Mapping[str, Any]) -> str:
    """Return the text of a message. Text parts are joined; missing content is an empty string."""
    return text_of(message.get("content"))


def get_message_role(message: Mapping[str, Any]) -> str:
    """Return the role of a message, or "unknown"."""
    role = message.get("role")
    return role if isinstance(role, str) else "unknown"


def is_assistant_message(message: Mapping[str, Any]) -> bool:
    """Return whether the model wrote the message."""
    return message.get("role") == "assistant"


def is_tool_message(message: Mapping[str, Any]) -> bool:
    """Return whether the message is a tool result."""
    return message.get("role") == "tool"


def is_user_message(message: Mapping[str, Any]) -> bool:
    """Return whether a user wrote the message."""
    return message.get("role") == "user"


def count_messages_by_role(messages: list[dict[str, Any]]) -> dict[str, int]:
    """Return the number of messages per role, in order of first appearance."""
    return dict(Counter(get_message_role(message) for message in messages))


def check_options(function: str, options: Mapping[str, object], kind: type[object]) -> None:
    """Raise TypeError for options that are not in the TypedDict `kind`, as Python does for unknown parameters."""
    unknown = sorted(options.keys() - kind.__annotations__.keys())
    if unknown:
        raise TypeError(f"{function} takes no {', '.join(unknown)}; it takes {', '.join(kind.__annotations__)}")

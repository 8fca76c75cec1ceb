"""Parse tool calls, run them concurrently and format their results."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rollout_server.core.message import ARGUMENTS, MalformedMessage, parse_object
from rollout_server.sdk.core.exceptions import ToolArgumentError
from rollout_server.tool import result_text

__all__ = [
    "create_tool_error_result",
    "create_tool_result",
    "execute_tool_calls",
    "get_tool_call_info",
    "parse_tool_arguments",
    "serialize_tool_result",
]


def create_tool_result(tool_call_id: str, content: str) -> dict[str, str]:
    """Return the tool message with the result of a call."""
    return {"role": "tool", "content": content, "tool_call_id": tool_call_id}


def create_tool_error_result(tool_call_id: str, error_message: str) -> dict[str, str]:
    """Return the tool message of a failed call. Its content starts with "Error: "."""
    return create_tool_result(tool_call_id, f"Error: {error_message}")


def serialize_tool_result(result: Any) -> str:
    """Return a tool result as text for the model: strings unchanged, numbers in plain form, everything else as JSON.

    Raises ValueError or TypeError for values without a JSON form, such as infinity.
    """
    return result_text(result)


def parse_tool_arguments(arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, given as JSON text or as an object. Raises `ToolArgumentError` for anything else."""
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if not isinstance(arguments, str):
        raise ToolArgumentError(f"arguments must be JSON text or an object, not {type(arguments).__name__}")
    try:
        return dict(parse_object(arguments, ARGUMENTS))
    except MalformedMessage as error:
        raise ToolArgumentError(f"Invalid JSON arguments: {error}") from None


def get_tool_call_info(tool_call: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Return id, function name and arguments of a call. A missing id becomes "unknown".

    Raises `ToolArgumentError` for a malformed call, with its id and function name if they are known.
    """
    if not isinstance(tool_call, Mapping):
        raise ToolArgumentError(f"a tool call must be an object, not {type(tool_call).__name__}")
    call_id, function = tool_call.get("id"), tool_call.get("function")
    known = call_id if isinstance(call_id, str) and call_id else "unknown"
    if not isinstance(function, Mapping):
        raise ToolArgumentError("the tool call has no function", tool_call_id=known)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ToolArgumentError("the function of the tool call has no name", tool_call_id=known)
    try:
        return known, name, parse_tool_arguments(function.get("arguments") or {})
    except ToolArgumentError as error:
        raise ToolArgumentError(str(error), tool_call_id=known, tool_name=name) from None


async def execute_tool_calls(
    tool_calls: list[dict[str, Any]], executor: Callable[[dict[str, Any]], Awaitable[dict[str, str]]]
) -> list[dict[str, str]]:
    """Run the calls concurrently and return the results in the calls' order. The first exception cancels the other calls."""
    tasks = [asyncio.ensure_future(executor(call)) for call in tool_calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()

"""Runs tool calls. What goes wrong becomes a text for the model, and the rollout goes on."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rollout_server.core.message import JSON, MalformedMessage, Message, ToolCall, parse_json
from rollout_server.runtime.port import ArgumentError, Tool, ToolError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The tool message of a call; `failed` says that its content is an error text."""

    call: ToolCall
    content: str
    failed: bool

    def message(self) -> Message:
        """As it goes into the conversation."""
        return Message.write({"role": "tool", "content": self.content, "tool_call_id": self.call.id})


class Toolbox:
    """The tools of one agent."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}

    async def run(self, call: ToolCall) -> ToolResult:
        """Runs one call. Raises nothing but the caller's own cancellation."""
        try:
            return ToolResult(call, await self._run(call), failed=False)
        except ToolError as error:
            return ToolResult(call, f"Error: {error}", failed=True)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return ToolResult(call, "Error: The tool was cancelled", failed=True)
        except (Exception, SystemExit) as error:  # the boundary to a tool author's code
            _log.debug("tool %s raised %s at %s", call.name, type(error).__name__, _place(error))
            return ToolResult(call, f"Error: {error}" if str(error) else f"Error: {type(error).__name__}", failed=True)

    async def _run(self, call: ToolCall) -> str:
        arguments = _arguments(call)
        tool = self._tools.get(call.name)
        if tool is None:
            raise ToolError(f"Unknown function '{call.name}'. Available: {list(self._tools)}")
        if not isinstance(arguments, Mapping):
            raise ToolError(
                f"Invalid arguments for {call.name}: a JSON object is needed, not {type(arguments).__name__}"
            )
        try:
            return await tool.run(arguments)
        except ArgumentError as error:
            raise ToolError(f"Invalid arguments for {call.name}: {error}") from None


def _place(error: BaseException) -> str:
    """File and line. The error's own text is not for the log: it may repeat what the model wrote."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown place"


def _arguments(call: ToolCall) -> JSON:
    if not isinstance(call.arguments, str):
        return call.arguments
    try:
        return parse_json(call.arguments)
    except MalformedMessage as error:
        raise ToolError(f"Invalid JSON arguments: {error}") from None

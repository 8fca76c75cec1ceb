"""The tools that an agent offers with its calls. The agent runs them itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from rollout_server.core.capture.call import OfferedTool
from rollout_server.core.capture.history import canonical_schema
from rollout_server.core.error import CallRefused
from rollout_server.core.message import JSON
from rollout_server.runtime.errors import ToolError
from rollout_server.runtime.ports import Tool

MOST_TOOLS: Final = 1000
"""Tools of one call."""
MOST_TOOL_TEXT: Final = 64 * 1024 * 1024
"""Characters in the tools of all conversations of one rollout. Each conversation holds its own."""


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool that only the agent can run."""

    name: str
    description: str
    parameters_json_schema: str

    async def run(self, arguments: Mapping[str, JSON]) -> NoReturn:
        """Raise `ToolError`: no call reaches the server."""
        raise ToolError(f"{self.name} runs in the agent that offered it")


def conversation_tools(offered: Sequence[OfferedTool], declared: Sequence[Tool]) -> tuple[Tool, ...] | None:
    """Return the tools of a conversation, None if they are those that the agent class declares, in the same order.

    Name, description and schema are compared, not the order of keys in a schema. The tree has checked the schemas.

    Raises:
        CallRefused: for too many tools, and for one without a name of its own.
    """
    if len(offered) > MOST_TOOLS:
        text = f"has {len(offered):,} tools, at most {MOST_TOOLS:,} are allowed"
        raise CallRefused("INVALID_CALL", "tools", text)
    names = set[str]()
    for index, tool in enumerate(offered):
        if not tool.name or tool.name in names:
            text = f"is {tool.name!r:.100}; it must be a text, and another one for each tool"
            raise CallRefused("INVALID_CALL", f"tools[{index}].name", text)
        names.add(tool.name)
    if [_compared(tool) for tool in offered] == [_compared(tool) for tool in declared]:
        return None
    return tuple(ClientTool(tool.name, tool.description, tool.parameters_json_schema) for tool in offered)


def _compared(tool: OfferedTool | Tool) -> tuple[str, str, str]:
    return tool.name, tool.description, canonical_schema(tool.parameters_json_schema, f"tool {tool.name}")


def check_tool_room(size: int, tools: Sequence[Tool] | None) -> int:
    """Return the size of a rollout's tools with those of another conversation. Raise `CallRefused` if they are too large."""
    size += sum(len(tool.name) + len(tool.description) + len(tool.parameters_json_schema) for tool in tools or ())
    if size > MOST_TOOL_TEXT:
        text = (
            f"the rollout's conversations have tools of more than {MOST_TOOL_TEXT:,} characters; continue one of them"
        )
        raise CallRefused("INVALID_CALL", "tools", text)
    return size

"""The connector of the server, which alone knows both kinds of tool servers."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from rollout_server.edge.toolsets.mcp.connector import McpConnector
from rollout_server.edge.toolsets.tool_service import ToolServiceConnector
from rollout_server.runtime.tools.toolset import (
    RequestedToolset,
    ToolsetCaller,
    ToolsetSession,
    ToolsetSource,
    is_tool_service,
)


class DialectConnector:
    """Opens sessions with MCP servers and with ToolServices."""

    def __init__(self, mcp: McpConnector, tool_service: ToolServiceConnector) -> None:
        self._mcp = mcp
        self._tool_service = tool_service

    def connect(self, source: ToolsetSource, caller: ToolsetCaller) -> AbstractAsyncContextManager[ToolsetSession]:
        """Open a session. See `ToolsetConnector`."""
        if isinstance(source, RequestedToolset) and is_tool_service(source):
            return self._tool_service.connect(source, caller)
        return self._mcp.connect(source, caller)

"""Limits of what an MCP server may send. Apart from the session, which is slow to import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class McpLimits:
    """Limits of what an MCP server may send.

    Args:
        response_bytes: bytes of one response, or of one line of a program's standard output.
        tools: number of tools that are read. Fewer are offered.
        list_bytes: bytes of the descriptions and schemas of all tools.
        pages: pages of the list of tools.
    """

    response_bytes: int = 8 * 1024 * 1024
    tools: int = 2000
    list_bytes: int = 4 * 1024 * 1024
    pages: int = 64

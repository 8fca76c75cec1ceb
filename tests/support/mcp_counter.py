"""An MCP server that counts, as a program: `python -m tests.support.mcp_counter stdio | PORT [stateless]`.

`add` counts for the rollout whose uid is in `_meta`, `add_here` for the session that the server keeps (in the protocols with a
handshake), and `add_alone` for the process.
"""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
import sys
from collections import Counter
from typing import Any

from mcp.server.mcpserver import Context, MCPServer
from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
    ToolAnnotations,
)

UID = "osmosis.rollout/uid"
PIXEL = base64.b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
        "1f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
    )
).decode()


def counter() -> MCPServer:
    """Return the server."""
    server = MCPServer("counter", log_level="WARNING")
    calls: Counter[str] = Counter()
    stopped: list[float] = []

    @server.tool()
    async def add(number: int, ctx: Context[Any, Any]) -> str:
        """Add to the counter of the rollout."""
        uid = str((ctx.request_context.meta or {}).get(UID, ""))
        await asyncio.sleep(0.001)  # others run in between
        calls[uid] += number
        return f"{uid}={calls[uid]}"

    @server.tool()
    async def add_here(number: int, ctx: Context[Any, Any]) -> str:
        """Add to the counter of the session."""
        session = f"session {(ctx.headers or {}).get('mcp-session-id')}"
        calls[session] += number
        return str(calls[session])

    @server.tool()
    async def add_alone(number: int) -> str:
        """Add to the counter of the process."""
        calls["process"] += number
        return str(calls["process"])

    @server.tool(annotations=ToolAnnotations(idempotent_hint=True))
    async def meta(ctx: Context[Any, Any]) -> dict[str, Any]:
        """Return `_meta` of the call."""
        return dict(ctx.request_context.meta or {})

    @server.tool(annotations=ToolAnnotations(read_only_hint=True))
    async def cancelled() -> int:
        """Return how many calls of `wait` were cancelled."""
        return len(stopped)

    @server.tool()
    async def wait(seconds: float) -> str:
        """Wait."""
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            stopped.append(seconds)
            raise
        return "waited"

    @server.tool()
    async def fail(text: str) -> str:
        """Raise an exception."""
        raise ValueError(text)

    @server.tool()
    async def exit(status: int) -> str:
        """End the process in the middle of a call."""
        sys.stderr.write("the counter gives up\n")
        sys.stderr.flush()
        os._exit(status)

    for function in (start_child, variable, media):
        server.add_tool(function)
    return server


def start_child() -> int:
    """Start a process in a session of its own that outlives this one, and return its id."""
    return subprocess.Popen(["/bin/sleep", "1000"], start_new_session=True).pid


async def variable(variable: str) -> str:
    """Return an environment variable."""
    return os.environ.get(variable, "(unset)")


async def media() -> CallToolResult:
    """Return content of all kinds."""
    return CallToolResult(
        content=[
            TextContent(text="first"),
            ImageContent(data=PIXEL, mime_type="image/png"),
            AudioContent(data="AAAA", mime_type="audio/wav"),
            ResourceLink(name="notes", uri="file:///notes.txt", description="all notes"),
            EmbeddedResource(resource=TextResourceContents(uri="file:///a.txt", text="inside")),
            EmbeddedResource(resource=BlobResourceContents(uri="file:///b.png", blob=PIXEL, mime_type="image/png")),
            EmbeddedResource(resource=BlobResourceContents(uri="file:///c.bin", blob="AAAA")),
        ]
    )


def main(how: str, state: str = "") -> None:
    """Serve until the process is killed, or its standard input ends."""
    if how == "stdio":
        counter().run("stdio")
    else:
        counter().run("streamable-http", port=int(how), stateless_http=state == "stateless")


if __name__ == "__main__":
    main(*sys.argv[1:])

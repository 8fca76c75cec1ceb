"""`rollout tools serve` as a process, and the tools that it serves in tests."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolResult, TextContent
from osmosis.rollout.v1 import message_pb2
from osmosis.rollout.v1 import tool_service_pb2 as pb

from tests.support.processes import Logged, environment, started

TOOLS = '''
import asyncio
import os
from pathlib import Path

from rollout_server import Image, ToolContext, ToolError, tool


@tool
async def add(amount: int, run: ToolContext) -> int:
    """Add to the counter of the rollout.

    It starts at zero.
    """
    before = run.state.get("count", 0)
    await asyncio.sleep(0)
    run.state["count"] = before + amount
    return run.state["count"]


@tool(idempotent=True)
def upper(text: str) -> str:
    """Return a text in capitals."""
    print("this line is not part of any protocol")
    os.system("echo nor is this one")
    return text.upper()


@tool(process=True)
def pid() -> int:
    """Return the process of the tool."""
    return os.getpid()


@tool(timeout=0.05)
async def slow() -> str:
    """Take longer than allowed."""
    await asyncio.sleep(60)
    return "late"


@tool
async def wait_for(file: str, run: ToolContext) -> str:
    """Wait until a file has a text, and return it. Each call leaves a line in FILE.begun."""
    with open(f"{file}.begun", "a") as begun:
        begun.write(f"{run.uid}\\n")
    while not (Path(file).exists() and (text := Path(file).read_text())):
        await asyncio.sleep(0.01)
    return text


@tool
async def whose(run: ToolContext) -> str:
    """Return what the tool sees of its rollout."""
    day = await run.once(lambda: {"day": 1})
    return f"{run.uid} {run.rollout_id!r} {dict(run.metadata)} {day} {run.cancelled} {run.now().tzinfo} {run.random().random() < 1}"


@tool
async def judged(run: ToolContext) -> str:
    """Use what a tool server does not have."""
    return str(run.model("judge"))


@tool
async def picture() -> list[object]:
    """Return a text and an image."""
    return ["a dot", Image(b"png bytes")]


@tool
async def refuse() -> str:
    """Report an error."""
    raise ToolError("there is no such thing")


@tool
async def long() -> str:
    """Return more than may be returned."""
    return "x" * 5_000_000
'''
_SERVING = re.compile(r"ToolService on gRPC port (\d+), MCP at (http://\S+:(\d+)/mcp)")


@dataclass
class ServingTools(Logged):
    """A running `rollout tools serve`."""

    grpc_port: int = 0
    mcp_url: str = ""

    async def start(self) -> None:
        """Wait until it serves."""
        await super().start()
        await self.logged("/mcp")
        found = _SERVING.search(self.text)
        assert found is not None, self.text
        self.grpc_port, self.mcp_url = int(found[1]), found[2]


@contextlib.asynccontextmanager
async def serve_tools(folder: Path, *arguments: str, source: str = TOOLS, **env: str) -> AsyncIterator[ServingTools]:
    """Run `rollout tools serve` for this source on free ports."""
    (folder / "tools.py").write_text(source)
    command = ("tools", "serve", "tools.py", "--grpc-port", "0", "--http-port", "0", *arguments)
    async with started(ServingTools, *command, cwd=folder, env=environment(**env)) as serving:
        yield serving


async def exists(file: Path, lines: int = 0) -> None:
    """Wait until a file exists and has so many lines."""
    while not file.exists() or file.read_text().count("\n") < lines:  # noqa: ASYNC110, ASYNC240 - another process writes it
        await asyncio.sleep(0.01)


def call_request(
    name: str, arguments: str = "{}", *, key: str, uid: str = "", metadata: str = ""
) -> pb.CallToolRequest:
    """A call of ToolService."""
    call = message_pb2.ToolCall(name=name, arguments_json=arguments)
    return pb.CallToolRequest(uid=uid, call_key=key, call=call, metadata_json=metadata)


def output_text(response: pb.CallToolResponse) -> str:
    """The text of a call that succeeded."""
    assert response.WhichOneof("result") == "output", response
    return "".join(part.text for part in response.output.parts)


def result_text(result: CallToolResult) -> str:
    """The text of a call that succeeded."""
    assert not result.is_error, result
    return "".join(block.text for block in result.content if isinstance(block, TextContent))


@contextlib.asynccontextmanager
async def mcp_client(url: str, era: str) -> AsyncIterator[Client]:
    """The official SDK's client. `era`: "2025-11-25" or "2026-07-28"."""
    async with (
        httpx2.AsyncClient(verify=False, trust_env=False, timeout=60) as http,  # reading certificates takes long
        Client(streamable_http_client(url, http_client=http), mode="legacy" if era == "2025-11-25" else era) as client,
    ):
        yield client

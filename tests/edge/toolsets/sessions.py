"""What the tests of MCP sessions share: connectors, servers and calls, and what a session leaves behind."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn
from rollout_server.core.message import JSON
from rollout_server.edge.targets.resolver import CheckedLookup
from rollout_server.edge.targets.rules import TargetRules
from rollout_server.edge.toolsets.mcp.connector import McpConnector
from rollout_server.edge.toolsets.mcp.limits import McpLimits
from rollout_server.runtime.ports import Content
from rollout_server.runtime.tools.toolset import McpServer, ToolsetCall, ToolsetCaller, ToolsetSession, ToolsetSource
from rollout_server.tool import mcp

from tests.support import mcp_faulty
from tests.support.mcp_counter import counter
from tests.support.resolver import Table
from tests.support.toy_model import until

CALLER = ToolsetCaller("u1")
SMALL = McpLimits(response_bytes=1_000_000)


def connector(limits: McpLimits | None = None, rules: TargetRules | None = None, **hosts: list[str]) -> McpConnector:
    """A connector with a resolver that knows only `hosts`."""
    names = Table({name.replace("_", "."): [addresses] for name, addresses in hosts.items()})
    return McpConnector(CheckedLookup(rules or TargetRules(), names), limits=limits)


def stdio_counter(**options: Any) -> McpServer:
    """The counter as a program."""
    root = str(Path(mcp_faulty.__file__).parent.parent.parent)
    return mcp([sys.executable, "-m", "tests.support.mcp_counter", "stdio"], directory=root, **options)


def faulty(fault: str) -> McpServer:
    """The faulty server as a program."""
    return mcp([sys.executable, "-S", mcp_faulty.__file__, fault])


def call(name: str, uid: str = "u1", **arguments: JSON) -> ToolsetCall:
    """A call with a key of its own."""
    return ToolsetCall(name, arguments, f"{uid}/{name}", uid)


async def text(session: ToolsetSession, name: str, uid: str = "u1", **arguments: JSON) -> str:
    """Call a tool whose result is a text."""
    content: Content = await session.call(call(name, uid, **arguments))
    assert isinstance(content, str)
    return content


async def fails(session: ToolsetSession, name: str = "call", **arguments: JSON) -> Exception:
    """Call a tool, and return its failure."""
    try:
        content = await session.call(call(name, **arguments))
    except Exception as error:
        return error
    raise AssertionError(f"{name} returned {content!r}")


async def not_opened(connection: McpConnector, source: ToolsetSource, caller: ToolsetCaller = CALLER) -> Exception:
    """Return why a session could not be opened."""
    try:
        async with connection.connect(source, caller):
            pass
    except Exception as error:
        return error
    raise AssertionError(f"{source} was opened")


@asynccontextmanager
async def http_counter(*, stateless: bool = False) -> AsyncIterator[str]:
    """Serve the counter over HTTP, and yield its URL."""
    config = uvicorn.Config(
        counter().streamable_http_app(stateless_http=stateless),
        port=0,
        loop="asyncio",
        log_level="error",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    # With a loop of its own: its tasks are not those of a session.
    serving = asyncio.create_task(asyncio.to_thread(server.run))
    await until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/mcp"
    finally:
        server.should_exit = True
        await serving


def children() -> set[int]:
    """The processes below this one, at any depth."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, last = {os.getpid()}, 0
    while len(found) != last:
        last = len(found)
        found |= {number for number, parent in parents.items() if parent in found}
    return found - {os.getpid()}


def remains() -> Counter[object]:
    """Child processes, open descriptors by kind, and tasks."""
    found: Counter[object] = Counter(f"process {number}" for number in children())
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found[os.readlink(f"/proc/self/fd/{number}").partition(":")[0]] += 1
    own = asyncio.current_task()
    found.update(task for task in asyncio.all_tasks() if not task.done() and task is not own)
    return found


@asynccontextmanager
async def nothing_remains() -> AsyncIterator[None]:
    """Check that no process, descriptor or task is left at the end. What ends late is waited for."""
    before = remains()
    yield
    for _ in range(100):
        if not remains() - before:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"left: {remains() - before}")

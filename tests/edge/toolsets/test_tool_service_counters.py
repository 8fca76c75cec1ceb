"""Many rollouts at once on one counter, of a tool server in Python and of the example in Node: no state crosses."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from rollout_server.edge.toolsets.tool_service import ToolServiceConnector
from rollout_server.runtime.errors import ToolError
from rollout_server.runtime.tools.protocols import ToolFailed
from rollout_server.runtime.tools.toolset import ToolsetCaller, ToolsetSession

from tests.support.processes import environment
from tests.support.tcp_proxy import TcpProxy
from tests.support.tool_service import LONG_METADATA, CounterService, call, connector, serving, source

ROLLOUTS, CALLS = 50, 8
EXAMPLE = Path(__file__).parents[3] / "examples/tool_server_node"
node = pytest.mark.skipif(
    shutil.which("node") is None or not (EXAMPLE / "node_modules/@grpc/grpc-js").is_dir(),
    reason="the example in Node is not installed: install Node 20 or newer with npm, and run `make node-example`",
)


async def count(session: ToolsetSession, number: int) -> None:
    """Add to the counter of one rollout, call by call and at once, and check that no other rollout added to it."""
    uid = f"u{number}"
    for step in range(1, CALLS + 1):
        result = await session.call(call("add", f"{uid}/{step}", uid, amount=number))
        assert result == str(number * step)
    many = [session.call(call("add", f"{uid}/{step}", uid, amount=number)) for step in range(CALLS + 1, 2 * CALLS + 1)]
    results = await asyncio.gather(*many)
    assert sorted(map(int, map(str, results))) == [number * step for step in range(CALLS + 1, 2 * CALLS + 1)]


async def count_at_once(to: ToolServiceConnector, url: str) -> None:
    """Count in 50 sessions, each of one rollout."""
    async with AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(to.connect(source(url), ToolsetCaller(f"u{number}")))
            for number in range(1, ROLLOUTS + 1)
        ]
        async with asyncio.TaskGroup() as tasks:
            for number, session in enumerate(sessions, 1):
                tasks.create_task(count(session, number))


async def test_no_state_crosses_in_python_and_each_key_runs_once() -> None:
    service = CounterService(lost_answers=1)
    async with serving(service) as url, connector() as to:
        await count_at_once(to, url)
    assert len(service.runs) == 2 * CALLS * ROLLOUTS
    assert set(service.runs.values()) == {1}
    assert len(service.calls) == 2 * len(service.runs)


@asynccontextmanager
async def running_node(port: int = 0, token: str = "") -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Yield the example's process and its URL."""
    process = await asyncio.create_subprocess_exec(
        "node",
        "server.js",
        str(port),
        cwd=EXAMPLE,
        env=environment(TOOL_SERVER_TOKEN=token),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        found = re.search(r"grpc://\S+", (await process.stdout.readline()).decode())
        assert found is not None
        yield process, found[0]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@node
async def test_no_state_crosses_in_node() -> None:
    async with running_node() as (process, url), connector() as to:
        await count_at_once(to, url)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


@node
async def test_node_runs_each_key_once_over_connections_that_break() -> None:
    caller = ToolsetCaller("u1", LONG_METADATA)
    async with (
        running_node() as (_, url),
        TcpProxy(int(url.rpartition(":")[2])) as proxy,
        connector() as to,
        to.connect(source(f"grpc://{proxy.address}"), caller) as session,
    ):
        tools = {tool.name: tool.idempotent for tool in await session.list_tools()}
        assert tools == {"add": False, "read": True}
        for step in range(1, 6):
            proxy.lose_an_answer()
            assert await session.call(call("add", f"k{step}", amount=1)) == str(step)
        assert proxy.connections > 5
        assert await session.call(call("add", "k1", amount=1)) == "1"  # the stored result
        assert await session.call(call("read", "k6")) == "5"


@node
async def test_node_returns_errors_for_the_model_and_checks_the_token() -> None:
    async with running_node(token="sk-1") as (_, url), connector() as to:
        async with to.connect(source(url), ToolsetCaller("u1", bearer="sk-1")) as session:
            with pytest.raises(ToolError, match="amount must be an integer"):
                await session.call(call("add", "k1", amount="1"))
            with pytest.raises(ToolError, match="there is no tool"):
                await session.call(call("constructor", "k2"))
        async with to.connect(source(url), ToolsetCaller("u1", bearer="sk-2")) as session:
            with pytest.raises(ToolFailed, match="UNAUTHENTICATED"):
                await session.list_tools()


@node
async def test_a_node_server_that_is_killed_and_started_again_is_found() -> None:
    async with connector() as to, AsyncExitStack() as stack:
        first = running_node()
        process, url = await stack.enter_async_context(first)
        session = await stack.enter_async_context(to.connect(source(url), ToolsetCaller("u1")))
        assert await session.call(call("add", "k1", amount=7)) == "7"
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        pending = asyncio.create_task(session.call(call("add", "k2", amount=1)))
        async with running_node(int(url.rpartition(":")[2])):
            assert await pending == "1"  # the counters of the first process are lost with it

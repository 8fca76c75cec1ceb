"""Twenty rollouts at once on one counter of each kind of tool server: no state crosses, and no call is run twice."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from rollout_server.runtime.tools.toolset import McpServer
from rollout_server.tool import mcp

from tests.support import rogue_program
from tests.support.mcp_servers import http_counter
from tests.support.processes import environment
from tests.support.tcp_proxy import TcpProxy
from tests.support.tool_server import serve_tools
from tests.support.tool_service import CounterService, serving
from tests.support.toolset_stand import Calls, Caught, Stand, nothing_remains, standing

ROLLOUTS, TURNS, PARALLEL = 20, 2, 3
NODE = Path(__file__).parents[2] / "examples/tool_server_node"
FILE = '''
from rollout_server import ToolContext, tool


@tool
async def add(amount: int, run: ToolContext) -> int:
    """Add to the counter of the rollout."""
    run.state["count"] = run.state.get("count", 0) + amount
    return run.state["count"]
'''
has_node = shutil.which("node") is not None and (NODE / "node_modules/@grpc/grpc-js").is_dir()
node = pytest.mark.skipif(not has_node, reason="needs Node 20 or newer with npm, and `make node-example`")


def count(name: str, argument: str, number: int) -> Calls:
    """Calls of a counter, several of them at once in each turn."""
    return [[(name, {argument: number})] * PARALLEL] * TURNS


async def count_at_once(
    stand: Stand, agent: str, name: str, argument: str, tools: Callable[[], str | None] = lambda: None
) -> None:
    """Count in all rollouts, and check that each has seen its own counter only."""
    numbers = range(101, 101 + ROLLOUTS)
    works = (stand.results(agent, count(name, argument, each), tools=tools()) for each in numbers)
    for number, texts in zip(numbers, await asyncio.gather(*works), strict=True):
        seen = [int(text.rpartition("=")[2]) for text in texts]
        for turn in range(TURNS):
            first = turn * PARALLEL + 1
            expected = [number * each for each in range(first, first + PARALLEL)]
            assert sorted(seen[first - 1 : first - 1 + PARALLEL]) == expected, texts
    assert len(stand.trainer.verdicts()) == ROLLOUTS


@pytest.fixture(autouse=True)
async def clean() -> AsyncIterator[None]:
    """Check that nothing is left of servers and sessions."""
    async with nothing_remains():
        yield


@asynccontextmanager
async def with_agent(source: McpServer) -> AsyncIterator[Stand]:
    """A server with the agent "counting", which has the tools of the source."""
    async with standing(Caught("counting", source)) as stand:
        yield stand


async def test_an_mcp_server_with_sessions() -> None:
    async with http_counter(handshake=True) as url, with_agent(mcp(url, include=["add_here"])) as stand:
        await count_at_once(stand, "counting", "add_here", "number")


async def test_an_mcp_server_without_sessions_knows_the_uid() -> None:
    async with http_counter() as url, with_agent(mcp(url, include=["add"])) as stand:
        await count_at_once(stand, "counting", "add", "number")


@pytest.mark.parametrize("handshake", [True, False])
async def test_a_shared_session_knows_the_uid(handshake: bool) -> None:
    async with (
        http_counter(handshake=handshake) as url,
        with_agent(mcp(url, include=["add"], session="shared")) as stand,
    ):
        await count_at_once(stand, "counting", "add", "number")


async def test_an_mcp_server_that_requests_name() -> None:
    async with http_counter(handshake=True) as url, standing() as stand:
        await count_at_once(stand, "plain", "add_here", "number", lambda: url)


async def test_a_program_is_a_process_for_each_rollout() -> None:
    program = mcp([sys.executable, "-SI", rogue_program.__file__, "mark"], include=["count"])
    async with with_agent(program) as stand:
        await count_at_once(stand, "counting", "count", "number")


async def test_a_tool_service_whose_answers_are_lost() -> None:
    service = CounterService(lost_answers=1)
    async with serving(service) as url, standing() as stand:
        await count_at_once(stand, "plain", "add", "amount", lambda: url)
    assert len(service.runs) == ROLLOUTS * TURNS * PARALLEL
    assert set(service.runs.values()) == {1}
    assert len(service.calls) == 2 * len(service.runs)


async def test_a_tool_service_whose_connections_break() -> None:
    service = CounterService()
    async with serving(service) as url, standing() as stand, TcpProxy(int(url.rpartition(":")[2])) as proxy:
        breaking = asyncio.create_task(_break_often(service, proxy))
        await count_at_once(stand, "plain", "add", "amount", lambda: f"grpc://{proxy.address}")
        breaking.cancel()
    assert proxy.connections > 1
    assert len(service.runs) == ROLLOUTS * TURNS * PARALLEL
    assert set(service.runs.values()) == {1}


async def _break_often(service: CounterService, proxy: TcpProxy) -> None:
    for calls in (10, 30, 60, 90):
        while len(service.calls) < calls:  # noqa: ASYNC110 - it is not told of calls
            await asyncio.sleep(0.001)
        proxy.cut()


@pytest.mark.parametrize("kind", ["grpc", "mcp"])
async def test_served_tools_of_a_file(kind: str, tmp_path: Path) -> None:
    async with serve_tools(tmp_path, source=FILE) as tools, standing() as stand:
        url = f"grpc://127.0.0.1:{tools.grpc_port}" if kind == "grpc" else tools.mcp_url
        await count_at_once(stand, "plain", "add", "amount", lambda: url)


@node
async def test_a_tool_service_in_node() -> None:
    async with AsyncExitStack() as stack:
        process = await asyncio.create_subprocess_exec(
            "node", "server.js", "0", cwd=NODE, env=environment(), stdout=asyncio.subprocess.PIPE
        )
        stack.push_async_callback(process.wait)
        stack.callback(process.kill)
        assert process.stdout is not None
        found = re.search(r"grpc://\S+", (await process.stdout.readline()).decode())
        assert found is not None
        stand = await stack.enter_async_context(standing())
        await count_at_once(stand, "plain", "add", "amount", lambda: found[0])

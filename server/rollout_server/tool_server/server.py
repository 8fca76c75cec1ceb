"""A tool server from its start to its end: gRPC and HTTP, or an MCP server on standard input and output."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from osmosis.rollout.v1 import tool_service_pb2_grpc
from rollout_gateway.http.serve import HttpListener, Listening

from rollout_server.authoring.tool_loader import LoadedTools
from rollout_server.edge.api_keys import Keyring, key_of
from rollout_server.edge.programs.runner import ProgramRunner
from rollout_server.edge.rpc.caller import TOOLS
from rollout_server.edge.rpc.interceptor import RequestInterceptor
from rollout_server.edge.rpc.listener import RpcListener, RpcSettings
from rollout_server.edge.targets.host_port import url_host
from rollout_server.edge.tools.pool import ProcessPool
from rollout_server.network_exposure import is_loopback
from rollout_server.runtime.aio.stop_signals import StopSignals
from rollout_server.runtime.run.lifecycle import start_agents
from rollout_server.runtime.tools.resources import ToolResources
from rollout_server.tool_server.calls import ServedTools
from rollout_server.tool_server.grpc_service import ServedToolService
from rollout_server.tool_server.limits import ToolServerLimits
from rollout_server.tool_server.mcp_http import PATH, McpHttpApp, transport_security
from rollout_server.tool_server.mcp_service import McpService
from rollout_server.tool_server.stdio import StandardStreams, serve_stdio

_log = logging.getLogger(__name__)
_RPC_GRACE_SECONDS = 1.0
_HTTP_GRACE_SECONDS = 1.0
_WRITE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class ToolServerSettings:
    """How a tool server listens. Port 0 means any free port.

    Args:
        key: the bearer key that callers need; empty: none.
    """

    host: str = "127.0.0.1"
    grpc_port: int = 50055
    http_port: int = 9005
    key: str = field(default="", repr=False)
    limits: ToolServerLimits = field(default_factory=ToolServerLimits)


@dataclass(frozen=True, slots=True)
class ToolServer:
    """A running tool server: its ports, and its tools with their calls."""

    grpc_port: int
    http_port: int
    served: ServedTools


async def serve_tools(loaded: LoadedTools, settings: ToolServerSettings, serving: Callable[[ToolServer], None]) -> None:
    """Serve tools until SIGTERM or Ctrl-C, and call `serving` once the server accepts requests. Raise as `open_server` does."""
    stopping = StopSignals()
    async with open_server(loaded, settings) as server:
        stopping.again = server.served.cancel
        serving(server)
        await stopping.first.wait()
        _log.info("stopping: running calls have %g s; a second signal cancels them", settings.limits.drain_seconds)


@asynccontextmanager
async def open_server(loaded: LoadedTools, settings: ToolServerSettings) -> AsyncIterator[ToolServer]:
    """Serve tools over gRPC and HTTP within the block. At its end running calls have some seconds.

    Raises OSError if a port is not available, ValueError for a key that cannot be used, and `AgentFailed` if the agent's `start`
    raises.
    """
    async with open_tools(loaded, settings.limits) as served, AsyncExitStack() as stack:
        keys = Keyring([key_of("default", settings.key)] if settings.key else [])
        http_port = await _open_http(loaded, settings, keys, served, stack)
        host = url_host(settings.host)
        rpc = RpcListener(
            RpcSettings((f"{host}:{settings.grpc_port}",), settings.limits.message_bytes),
            [RequestInterceptor(keys.caller, lambda header: None)],
            {TOOLS: partial(tool_service_pb2_grpc.add_ToolServiceServicer_to_server, ServedToolService(served))},
        )
        (grpc_port,) = await rpc.start()
        stack.push_async_callback(rpc.stop, _RPC_GRACE_SECONDS)
        count = f"{len(served.tools)} tools" if len(served.tools) > 1 else "1 tool"
        text = "serving %s: ToolService on gRPC port %d, MCP at http://%s:%d%s"
        _log.info(text, count, grpc_port, host, http_port, PATH)
        yield ToolServer(grpc_port, http_port, served)
        await rpc.say_not_serving()
        await served.drain()


async def serve_tools_on_stdio(loaded: LoadedTools, streams: StandardStreams, limits: ToolServerLimits) -> None:
    """Serve tools to the MCP client on standard input and output, until it closes standard input, or SIGTERM or Ctrl-C.

    Raises `AgentFailed` if the agent's `start` raises.
    """
    stopping = StopSignals()
    async with open_tools(loaded, limits) as served:
        # The process belongs to one client, so calls without a uid share the state of one session.
        service = McpService(served, loaded.name, loaded.version, session="stdio")
        reading = asyncio.create_task(serve_stdio(service.server, streams, limits.message_bytes), name="stdio")
        stopped = asyncio.create_task(stopping.first.wait(), name="stop")
        await asyncio.wait({reading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopping.again = served.cancel
        if not reading.done():
            await served.drain()
            # The results are still on their way through the SDK, which does not say when it has written them.
            await asyncio.wait({reading}, timeout=_WRITE_SECONDS)
        for task in (stopped, reading):
            task.cancel()
        await asyncio.wait({stopped, reading})
        if not reading.cancelled():
            reading.result()


@asynccontextmanager
async def open_tools(loaded: LoadedTools, limits: ToolServerLimits) -> AsyncIterator[ServedTools]:
    """Start the agent, and yield its tools with threads and processes of their own."""
    async with AsyncExitStack() as stack:
        if loaded.agent is not None:
            await start_agents([loaded.agent], stack)
        resources = ToolResources(processes=ProcessPool(), programs=ProgramRunner())
        stack.push_async_callback(resources.close)
        served = ServedTools(loaded.tools, resources, limits)
        stack.callback(served.cancel)
        yield served


async def _open_http(
    loaded: LoadedTools, settings: ToolServerSettings, keys: Keyring, served: ServedTools, stack: AsyncExitStack
) -> int:
    limits = settings.limits
    manager = StreamableHTTPSessionManager(
        McpService(served, loaded.name, loaded.version).server,
        security_settings=transport_security(settings.host, loopback=is_loopback(settings.host)),
        session_idle_timeout=limits.idle_seconds,
        max_request_body_size=limits.message_bytes,
        max_sessions=limits.sessions,
    )
    await stack.enter_async_context(_running(manager))
    listening = Listening(settings.host, settings.http_port, grace_seconds=_HTTP_GRACE_SECONDS)
    http = HttpListener(McpHttpApp(manager, keys), listening)
    port = await http.start()
    stack.push_async_callback(http.stop)
    return port


@asynccontextmanager
async def _running(manager: StreamableHTTPSessionManager) -> AsyncIterator[None]:
    """Run the session manager in a task of its own: its task group would wrap the errors that are raised in this block."""
    started, stopping = asyncio.Event(), asyncio.Event()

    async def run() -> None:
        async with manager.run():
            started.set()
            await stopping.wait()

    task = asyncio.create_task(run(), name="MCP sessions")
    await started.wait()
    try:
        yield
    finally:
        stopping.set()
        await task

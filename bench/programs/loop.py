"""Event loop of all benchmark programs. It is the server's, so that no program has an advantage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
from aiohttp import web


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a uvloop event loop if uvloop is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def serve(app: web.Application, port: int) -> None:
    """Serve an application on 127.0.0.1 until SIGTERM."""
    web.run_app(
        app,
        host="127.0.0.1",
        port=port,
        loop=new_loop(),
        print=None,
        access_log=None,
        backlog=4096,
        shutdown_timeout=1.0,
        keepalive_timeout=3600.0,
    )


_SERVER_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    # By default gRPC ends calls with CANCELLED when 1,000 wait to be accepted, or one waits for 30 s.
    ("grpc.server.max_pending_requests", 1_000_000),
    ("grpc.server.max_pending_requests_hard_limit", 1_000_000),
    ("grpc.server_max_unrequested_time_in_server", 86_400),
]


def grpc_beside(handler: grpc.GenericRpcHandler, port: int) -> Callable[[web.Application], AsyncIterator[None]]:
    """Return a cleanup context that serves gRPC on 127.0.0.1 while an application runs."""

    async def serving(_: web.Application) -> AsyncIterator[None]:
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        server.add_generic_rpc_handlers((handler,))
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        yield
        await server.stop(None)

    return serving

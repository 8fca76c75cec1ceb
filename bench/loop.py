"""The event loop of all programs of the benchmark: the one that the server takes, so that none has an advantage."""

from __future__ import annotations

import asyncio

from aiohttp import web


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop of uvloop's, where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def serve(app: web.Application, port: int) -> None:
    """Serves on 127.0.0.1 until SIGTERM."""
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

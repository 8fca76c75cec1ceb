"""Event loop of all benchmark programs. It is the server's, so that no program has an advantage."""

from __future__ import annotations

import asyncio

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

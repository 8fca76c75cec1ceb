"""The counter of `mcp_counter` over HTTP, in this process, in either era of the protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from tests.support.mcp_counter import counter


class WithoutDiscovery:
    """An ASGI application that knows only the protocols with a handshake."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Refuse `server/discover`, and hand on all other requests."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            event = await receive()
            body, more = body + event.get("body", b""), event.get("more_body", False)
        message = json.loads(body)
        if message.get("method") == "server/discover":
            error = {"code": -32601, "message": "Method not found"}
            text = json.dumps({"jsonrpc": "2.0", "id": message["id"], "error": error}).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": text})
            return
        given = [{"type": "http.request", "body": body, "more_body": False}]

        async def once() -> Any:
            return given.pop() if given else await receive()

        await self._app(scope, once, send)


@asynccontextmanager
async def http_counter(*, handshake: bool = False) -> AsyncIterator[str]:
    """Serve the counter, and yield its URL. `handshake`: only the protocols up to 2025-11-25."""
    app: Any = counter().streamable_http_app()
    config = uvicorn.Config(
        WithoutDiscovery(app) if handshake else app,
        port=0,
        loop="asyncio",
        log_level="error",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(asyncio.to_thread(server.run))  # with a loop of its own
    while not server.started:  # noqa: ASYNC110 - it runs in a thread
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/mcp"
    finally:
        server.should_exit = True
        await serving

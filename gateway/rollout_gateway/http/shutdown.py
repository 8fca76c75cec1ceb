"""Requests that are cut short because the gateway stops."""

import asyncio

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class ShutdownMiddleware:
    """ASGI middleware that answers 503 when the task of a request is cancelled, and ends a stream as streams end.

    Only whoever stops the listener cancels these tasks. Rollouts are not touched: the client comes back, here or to another
    gateway, and finds them.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started: Message | None = None

        async def noting(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = message
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                raise
            if started is None:
                headers = {"retry-after": "1", "connection": "close"}
                await JSONResponse({"detail": "The gateway stops: ask again"}, 503, headers)(scope, receive, send)
            elif all(name.lower() != b"content-length" for name, _ in started["headers"]):
                await send({"type": "http.response.body", "body": b""})
            else:
                raise

"""The size limit of request bodies."""

import asyncio
from contextlib import suppress
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_DISCARD_SECONDS: Final = 5.0
_DISCARD_BYTES: Final = 64 * 1024 * 1024


class BodyLimit:
    """ASGI middleware that answers 413 to bodies over `max_bytes`.

    A declared length is refused before anything is read. A chunked body is counted as it arrives; the exception raised
    then passes through the application to Starlette's handler, so at most `max_bytes` and one chunk are ever held.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._max_bytes:
            refusal = self._refusal()
            await self._discard(receive)
            response = JSONResponse({"detail": refusal.detail}, refusal.status_code, refusal.headers)
            await response(scope, receive, send)
            return
        await self._app(scope, self._counted(receive), send)

    def _counted(self, receive: Receive) -> Receive:
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_bytes:
                await self._discard(receive)
                raise self._refusal()
            return message

        return counted

    async def _discard(self, receive: Receive) -> None:
        """Reads on for a while: a client that writes before it reads would otherwise find its connection reset, not an answer."""
        left = max(self._max_bytes, _DISCARD_BYTES)
        with suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_SECONDS):
                while left > 0 and (message := await receive()).get("more_body", False):
                    left -= len(message["body"])

    def _refusal(self) -> HTTPException:
        # The rest of the body is still on its way, so the connection cannot be used again.
        return HTTPException(413, f"The body is larger than {self._max_bytes} bytes", {"connection": "close"})

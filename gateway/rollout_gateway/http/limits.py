"""The limits of request bodies: their size, and the time they may take to arrive."""

import asyncio
from contextlib import suppress
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_DISCARD_SECONDS: Final = 5.0
# Who has sent nothing for so long waits for the answer.
_QUIET_SECONDS: Final = 0.5
_DISCARD_BYTES: Final = 64 * 1024 * 1024


class BodyLimit:
    """ASGI middleware that answers 413 to bodies over `max_bytes` and 408 to those not whole after `seconds`.

    It does so once the application asks for the body, which it does after it has looked at the key. A declared length is
    refused before anything is read; otherwise a body is counted and timed as it arrives. The exception passes through the
    application to Starlette's handler, so at most `max_bytes` and one chunk are ever held. How long the application takes is
    limited by the end of the gateway only, see `RequestBoundary`.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float = 60.0) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await self._app(scope, self._limited(Headers(scope=scope), receive), send)

    def _limited(self, headers: Headers, receive: Receive) -> Receive:
        taken = 0
        declared = headers.get("content-length", "")
        too_large = declared.isdecimal() and int(declared[:20]) > self._max_bytes
        # None once the body is whole: what is waited for then is the end of the connection.
        ends: float | None = asyncio.get_running_loop().time() + self._seconds

        async def limited() -> Message:
            nonlocal taken, ends
            if too_large:
                # A client that waits to be told to send its body has not begun, and reading would tell it.
                if headers.get("expect", "").lower() != "100-continue":
                    await self._discard(receive)
                raise self._too_large()
            try:
                async with asyncio.timeout_at(ends):
                    message = await receive()
            except TimeoutError:
                raise self._too_slow() from None
            if not message.get("more_body", False):
                ends = None
            taken += len(message.get("body", b""))
            if taken > self._max_bytes:
                await self._discard(receive)
                raise self._too_large()
            return message

        return limited

    async def _discard(self, receive: Receive) -> None:
        """Reads on for a while: a client that writes before it reads would otherwise find its connection reset, not an answer."""
        left = max(self._max_bytes, _DISCARD_BYTES)
        with suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_SECONDS):
                while left > 0:
                    message = await asyncio.wait_for(receive(), _QUIET_SECONDS)
                    if not message.get("more_body", False):
                        return
                    left -= len(message["body"])

    # In both cases the rest of the body is still on its way, so the connection cannot be used again.

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"The body is larger than {self._max_bytes} bytes", {"connection": "close"})

    def _too_slow(self) -> HTTPException:
        return HTTPException(408, f"The body did not arrive within {self._seconds:g} s", {"connection": "close"})

"""The size limit of request bodies."""

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send


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
                raise self._refusal()
            return message

        return counted

    def _refusal(self) -> HTTPException:
        # The rest of the body is still on its way, so the connection cannot be used again.
        return HTTPException(413, f"The body is larger than {self._max_bytes} bytes", {"connection": "close"})

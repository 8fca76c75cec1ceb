"""The outermost layer: request ids, the shape of errors, and the one place where an unforeseen exception ends."""

import logging
import re
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_gateway.rest.errors import reshaped

_LOG = logging.getLogger(__name__)

# Also what gRPC metadata can carry, so that the id is the same in both servers' logs.
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class RequestBoundary:
    """ASGI middleware that gives each request an id and answers what nobody handled with 500.

    A caller's `x-request-id` is kept if it is 1 to 128 visible ASCII characters. The id is found under
    `scope["state"]["request_id"]` and goes out with every answer. Where `is_plain` says that a request is the plain API's,
    errors of the layers below, which know FastAPI's shape only, go out in that API's shape.
    """

    def __init__(self, app: ASGIApp, is_plain: Callable[[Scope], bool] = lambda _: False) -> None:
        self._app = app
        self._is_plain = is_plain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received = Headers(scope=scope).get("x-request-id", "")
        request_id = received if _REQUEST_ID.fullmatch(received) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        outgoing = _Outgoing(send, request_id, lambda: self._is_plain(scope))
        try:
            await self._app(scope, receive, outgoing)
        except Exception:
            _LOG.exception("request %s: %s %s failed", request_id, scope["method"], scope["path"])
            if not outgoing.started:
                await JSONResponse({"detail": "Internal server error"}, 500)(scope, receive, outgoing)


class _Outgoing:
    """The `send` of one request. An error of the plain API is held back until it is whole, all else passes at once."""

    def __init__(self, send: Send, request_id: str, is_plain: Callable[[], bool]) -> None:
        self._send = send
        self._request_id = request_id
        self._is_plain = is_plain
        self._held: Message | None = None
        self._content = bytearray()
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            MutableHeaders(scope=message)["x-request-id"] = self._request_id
            if message["status"] >= 400 and self._is_plain():
                self._held = message
                return
        elif self._held is not None:
            self._content += message.get("body", b"")
            if not message.get("more_body", False):
                await self._let_go(self._held)
            return
        await self._send(message)

    async def _let_go(self, start: Message) -> None:
        content = reshaped(start["status"], bytes(self._content), self._request_id)
        MutableHeaders(scope=start)["content-length"] = str(len(content))
        await self._send(start)
        await self._send({"type": "http.response.body", "body": content})

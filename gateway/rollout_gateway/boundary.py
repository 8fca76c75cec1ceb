"""The outermost layer: request ids, and the one place where an unforeseen exception ends."""

import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LOG = logging.getLogger(__name__)

# Also what gRPC metadata can carry, so that the id is the same in both servers' logs.
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class Boundary:
    """ASGI middleware that gives each request an id and answers what nobody handled with 500.

    A caller's `x-request-id` is kept if it is 1 to 128 visible ASCII characters. The id is found under
    `scope["state"]["request_id"]` and goes out with every answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received = Headers(scope=scope).get("x-request-id", "")
        request_id = received if _REQUEST_ID.fullmatch(received) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            _LOG.exception("request %s: %s %s failed", request_id, scope["method"], scope["path"])
            if not started:
                await JSONResponse({"detail": "Internal server error"}, 500)(scope, receive, send_with_id)

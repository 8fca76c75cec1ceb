"""The outermost layer: request ids, metrics, and the one place where an unforeseen exception, or a cancel, ends."""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_gateway.http.metrics import HttpMetrics
from rollout_gateway.rest.errors import http_problem, plain_response

_LOG = logging.getLogger(__name__)

# Also what gRPC metadata can carry, so that the id is the same in both servers' logs.
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class RequestBoundary:
    """ASGI middleware that gives each request an id, counts it, and answers what nobody handled with 500.

    A caller's `x-request-id` is kept if it is 1 to 128 visible ASCII characters. The id is found under
    `scope["state"]["request_id"]` and goes out with every answer. Where `is_plain` says that a request is the plain API's,
    errors have that API's shape.

    A request whose task is cancelled is answered with 503, and a stream ends as streams end: only whoever stops the listener
    cancels these tasks. Rollouts are not touched: the client comes back, here or to another gateway, and finds them.
    """

    def __init__(
        self, app: ASGIApp, is_plain: Callable[[Scope], bool] = lambda _: False, meters: HttpMetrics | None = None
    ) -> None:
        self._app = app
        self._is_plain = is_plain
        self._meters = meters or HttpMetrics()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received = Headers(scope=scope).get("x-request-id", "")
        request_id = received if _REQUEST_ID.fullmatch(received) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        began = time.perf_counter()
        started: Message | None = None

        async def outgoing(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = message
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        async def fail(status: int, text: str, **headers: str) -> None:
            problem = http_problem(status, text, headers)
            response = plain_response(problem, request_id) if self._is_plain(scope) else problem.response()
            await response(scope, receive, outgoing)

        try:
            await self._app(scope, receive, outgoing)
        except Exception:
            _LOG.exception("request %s: %s %s failed", request_id, scope["method"], scope["path"])
            if started is None:
                await fail(500, "Internal server error")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if (
                task is None
                or not task.cancelling()
                or (started and "content-length" in Headers(raw=started["headers"]))
            ):
                raise
            if started is None:
                await fail(503, "The gateway stops: ask again", **{"retry-after": "1", "connection": "close"})
            else:
                await send({"type": "http.response.body", "body": b""})
        finally:
            self._meters.count(scope, started["status"] if started else None, time.perf_counter() - began)

"""The outermost layer: request ids, metrics, limits of bodies, and where an unforeseen exception, or a cancel, ends."""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_gateway.rest.errors import http_problem, plain_response
from rollout_gateway.settings import GatewaySettings

_LOG = logging.getLogger(__name__)

# Also what gRPC metadata can carry, so that the id is the same in both servers' logs.
_REQUEST_ID = re.compile(r"[!-~]{1,128}")

_DISCARD_SECONDS: Final = 5.0
# Who has sent nothing for so long waits for the answer.
_QUIET_SECONDS: Final = 0.5
_DISCARD_BYTES: Final = 64 * 1024 * 1024
_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
# Whatever a client makes up is one method, so that nobody can fill the memory with labels.
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_NOWHERE: Final = "none"
_NO_ANSWER: Final = 499


class HttpMetrics:
    """Counts and times requests in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "rollout_gateway_requests",
            "HTTP requests answered, 499: the client left before it was.",
            ("route", "method", "status"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "rollout_gateway_request_seconds",
            "From an HTTP request's head to the end of its answer.",
            ("route", "method"),
            buckets=_BUCKETS,
            registry=self._registry,
        )

    def count(self, scope: Scope, status: int | None, seconds: float) -> None:
        """One request that is over, None: without an answer. Its label is the route's template, never the path, which holds ids."""
        route = getattr(scope.get("route"), "path", _NOWHERE)
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._requests.labels(route, method, str(status or _NO_ANSWER)).inc()
        self._seconds.labels(route, method).observe(seconds)

    def text(self) -> bytes:
        """The metrics in Prometheus' text form."""
        return generate_latest(self._registry)


class RequestBoundary:
    """ASGI middleware that gives each request an id, counts it, and answers what nobody handled with 500.

    A caller's `x-request-id` is kept if it is 1 to 128 visible ASCII characters. The id is found under
    `scope["state"]["request_id"]` and goes out with every answer. Where `is_plain` says that a request is the plain API's,
    errors have that API's shape. Of the `limits`, a larger body is answered with 413 and a slower one with 408, once it is read.

    A request whose task is cancelled is answered with 503, and a stream ends as streams end: only whoever stops the listener
    cancels these tasks. Rollouts are not touched: the client comes back, here or to another gateway, and finds them.
    """

    def __init__(
        self,
        app: ASGIApp,
        is_plain: Callable[[Scope], bool] = lambda _: False,
        meters: HttpMetrics | None = None,
        limits: GatewaySettings | None = None,
    ) -> None:
        self._app = app
        self._is_plain = is_plain
        self._meters = meters or HttpMetrics()
        self._limits = limits or GatewaySettings()

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
            await self._app(scope, _limited(scope, receive, self._limits), outgoing)
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


def _limited(scope: Scope, receive: Receive, limits: GatewaySettings) -> Receive:
    """Receives a body within the limits: what is declared too large before anything is read, others as they arrive.

    The exceptions pass through the application to its handlers, so at most `max_body_bytes` and one chunk are ever held. In both
    cases the rest of the body is still on its way, so the connection cannot be used again.
    """
    headers, most, taken = Headers(scope=scope), limits.max_body_bytes, 0
    declared = headers.get("content-length", "")
    # None once the body is whole: what is waited for then is the end of the connection.
    ends: float | None = asyncio.get_running_loop().time() + limits.body_seconds
    too_large = HTTPException(413, f"The body is larger than {most} bytes", {"connection": "close"})
    too_slow = HTTPException(408, f"The body did not arrive within {limits.body_seconds:g} s", {"connection": "close"})

    async def limited() -> Message:
        nonlocal taken, ends
        if declared.isdecimal() and int(declared[:20]) > most:
            # A client that waits to be told to send its body has not begun, and reading would tell it.
            if headers.get("expect", "").lower() != "100-continue":
                await _discard(receive, most)
            raise too_large
        try:
            async with asyncio.timeout_at(ends):
                message = await receive()
        except TimeoutError:
            raise too_slow from None
        if not message.get("more_body", False):
            ends = None
        taken += len(message.get("body", b""))
        if taken > most:
            await _discard(receive, most)
            raise too_large
        return message

    return limited


async def _discard(receive: Receive, max_bytes: int) -> None:
    """Reads on for a while: a client that writes before it reads would otherwise find its connection reset, not an answer."""
    left = max(max_bytes, _DISCARD_BYTES)
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_SECONDS):
            while left > 0:
                message = await asyncio.wait_for(receive(), _QUIET_SECONDS)
                if not message.get("more_body", False):
                    return
                left -= len(message["body"])

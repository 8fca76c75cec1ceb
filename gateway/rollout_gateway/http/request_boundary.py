"""Outermost ASGI layer: request ids, metrics, body limits, and handling of unexpected exceptions and cancellation."""

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

# gRPC metadata can carry these characters too, so the gateway and the server log the same id.
_REQUEST_ID = re.compile(r"[!-~]{1,128}")

_DISCARD_SECONDS: Final = 5.0
# A client that has sent nothing for this time is waiting for the response.
_QUIET_SECONDS: Final = 0.5
_DISCARD_BYTES: Final = 64 * 1024 * 1024
_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
# Other methods share one label value, so clients cannot fill the memory with labels.
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_NOWHERE: Final = "none"
_NO_ANSWER: Final = 499


class HttpMetrics:
    """Request counts and durations, in a separate Prometheus registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "rollout_gateway_requests",
            "HTTP requests by status; 499: the client disconnected before the response.",
            ("route", "method", "status"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "rollout_gateway_request_seconds",
            "Time from the head of an HTTP request to the end of its response.",
            ("route", "method"),
            buckets=_BUCKETS,
            registry=self._registry,
        )

    def count(self, scope: Scope, status: int | None, seconds: float) -> None:
        """Count a finished request by its route template, because paths contain ids. `status` None: it had no response."""
        route = getattr(scope.get("route"), "path_format", _NOWHERE)
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._requests.labels(route, method, str(status or _NO_ANSWER)).inc()
        self._seconds.labels(route, method).observe(seconds)

    def text(self) -> bytes:
        """Return the metrics in the Prometheus text format."""
        return generate_latest(self._registry)


class RequestBoundary:
    """ASGI middleware that gives each request an id, counts it, and turns an unhandled exception into 500.

    A client's `x-request-id` is kept if it is 1 to 128 visible ASCII characters. The id is stored in
    `scope["state"]["request_id"]` and sent with every response. Errors have the REST API's shape if `is_plain` returns true.
    Reading a body beyond the `limits` results in 413 (too large) or 408 (too slow).

    A cancelled request gets 503, and a cancelled stream ends normally: only a stopping listener cancels these tasks. Rollouts
    continue. The client retries, here or at another gateway, and finds them.
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
            # Re-raise if only an awaited task was cancelled, not this one. Re-raise also for a response with a declared
            # length, which cannot end early: uvicorn closes the connection.
            if (
                task is None
                or not task.cancelling()
                or (started and "content-length" in Headers(raw=started["headers"]))
            ):
                raise
            if started is None:
                await fail(
                    503, "The gateway is shutting down; try again", **{"retry-after": "1", "connection": "close"}
                )
            else:
                await send({"type": "http.response.body", "body": b""})
        finally:
            self._meters.count(scope, started["status"] if started else None, time.perf_counter() - began)


def _limited(scope: Scope, receive: Receive, limits: GatewaySettings) -> Receive:
    """Wrap `receive` with the body limits. A declared length is checked before reading, other bodies as they arrive.

    The exceptions pass through the application to its handlers, so memory holds at most `max_body_bytes` and one chunk. The
    rest of the body is still in flight, so the connection cannot be reused.
    """
    is_model_call = scope["path"].removeprefix(scope.get("root_path", "")).startswith("/r/")
    most = limits.max_model_body_bytes if is_model_call else limits.max_body_bytes
    headers, taken = Headers(scope=scope), 0
    declared = headers.get("content-length", "")
    # None after the complete body: the application then waits for the disconnect, which has no time limit.
    ends: float | None = asyncio.get_running_loop().time() + limits.body_seconds
    too_large = HTTPException(413, f"The body is larger than {most} bytes", {"connection": "close"})
    too_slow = HTTPException(408, f"The body did not arrive within {limits.body_seconds:g} s", {"connection": "close"})

    async def limited() -> Message:
        nonlocal taken, ends
        if declared.isdecimal() and int(declared[:20]) > most:
            # With `Expect: 100-continue` the client has sent nothing yet, and reading would request the body.
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
    """Read on for a while: a client that writes before it reads would see a connection reset in place of the response."""
    left = max(max_bytes, _DISCARD_BYTES)
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_SECONDS):
            while left > 0:
                message = await asyncio.wait_for(receive(), _QUIET_SECONDS)
                if not message.get("more_body", False):
                    return
                left -= len(message["body"])

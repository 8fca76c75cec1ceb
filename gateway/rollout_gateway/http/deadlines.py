"""Deadlines of HTTP clients: the header `grpc-timeout`, which bounds the calls that a request makes.

The header is gRPC's own (a number of up to eight digits and a unit), which HTTP gateways of gRPC services take over. It is
kept in a context variable for the time of one request, so that no route needs to think of it: `honour_deadline` stands
before every route, `DeadlineMiddleware` before the stub. A deadline ends a call, never a rollout: a stream that ends so is
one whose reader left.
"""

import re
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request

_HEADER: Final = "grpc-timeout"
_FORMAT: Final = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNITS: Final[Mapping[str, float]] = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
# Eight digits of hours overflow gRPC's clock, and it takes the deadline for one that has passed.
_LONGEST_SECONDS: Final = 366 * 86_400.0
_MALFORMED: Final = f"The header {_HEADER} must be 1 to 8 digits and a unit (H, M, S, m, u or n), such as 30S or 500m"

#: When the calls of the current request have to end, on the monotonic clock; None: whenever they like.
_ENDS: Final[ContextVar[float | None]] = ContextVar("rollout_gateway_deadline", default=None)


async def honour_deadline(request: Request) -> None:
    """A dependency of every route: keeps the request's deadline for its calls. Answers a malformed one with 400."""
    given = request.headers.getlist(_HEADER)
    if given:
        _ENDS.set(time.monotonic() + _seconds(given))


def seconds_left() -> float | None:
    """Until the current request's deadline; None without one, negative after it."""
    ends = _ENDS.get()
    return None if ends is None else ends - time.monotonic()


class DeadlineMiddleware:
    """A stub whose calls last no longer than the given seconds, whatever their own timeouts say."""

    def __init__(self, stub: object, seconds: float) -> None:
        self._stub = stub
        self._seconds = seconds

    def __getattr__(self, rpc: str) -> Callable[..., Any]:
        method = getattr(self._stub, rpc)

        def call(request: object, *, timeout: float | None = None, **options: Any) -> Any:
            return method(request, timeout=self._seconds if timeout is None else min(timeout, self._seconds), **options)

        return call


def _seconds(given: list[str]) -> float:
    found = _FORMAT.fullmatch(given[0]) if len(given) == 1 else None
    if found is None:
        raise HTTPException(400, _MALFORMED)
    return min(int(found[1]) * _UNITS[found[2]], _LONGEST_SECONDS)

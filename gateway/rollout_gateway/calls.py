"""Calls to the rollout server on behalf of an HTTP request: in whose name, and until when."""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import grpc
from osmosis.rollout.v1.outcome_pb2 import Outcome
from osmosis.rollout.v1.rollout_service_pb2 import AcknowledgeOutcomeRequest, RunRolloutRequest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from rollout_gateway.fleet.errors import too_late
from rollout_gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub

_LOG = logging.getLogger(__name__)
# gRPC carries only ASCII, and servers take 8 KiB of metadata for a call; no key and no trace is as long as this.
_VISIBLE: Final = re.compile(r"[ -~]{0,2048}")
_T = TypeVar("_T")

_DEADLINE: Final = "grpc-timeout"
_DEADLINE_FORMAT: Final = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNITS: Final[Mapping[str, float]] = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
# Eight digits of hours overflow gRPC's clock, and it takes the deadline for one that has passed.
_LONGEST_SECONDS: Final = 366 * 86_400.0
_MALFORMED: Final = f"The header {_DEADLINE} must be 1 to 8 digits and a unit (H, M, S, m, u or n), such as 30S or 500m"

CallMetadata = tuple[tuple[str, str], ...]


class ClientDisconnected(Exception):
    """The HTTP client left before it could be answered."""


class StreamEndedEarly(Exception):
    """The server closed a rollout's stream with OK, but without an outcome."""


async def honour_deadline(request: Request) -> None:
    """A dependency of every route: the header `grpc-timeout`, which HTTP gateways of gRPC services take over, bounds its calls.

    A deadline ends a call, never a rollout: a stream that ends so is one whose reader left. Answers a malformed one with 400.
    """
    given = request.headers.getlist(_DEADLINE)
    if not given:
        return
    found = _DEADLINE_FORMAT.fullmatch(given[0]) if len(given) == 1 else None
    if found is None:
        raise HTTPException(400, _MALFORMED)
    request.state.ends = time.monotonic() + min(int(found[1]) * _UNITS[found[2]], _LONGEST_SECONDS)


class BoundStub:
    """A stub whose calls are made in a request's name: with its metadata, and until its deadline.

    A call lasts `seconds` at most if it is given no timeout of its own; None: as long as it likes. Raises grpc.aio.AioRpcError,
    DEADLINE_EXCEEDED, once the deadline has passed: gRPC would give a fast server a chance.
    """

    def __init__(self, server: object, metadata: CallMetadata, ends: float | None, seconds: float) -> None:
        self._server, self._metadata, self._ends, self._seconds = server, metadata, ends, seconds

    def __getattr__(self, rpc: str) -> Callable[..., Any]:
        def call(message: object, **options: Any) -> Any:
            timeout = options.get("timeout", self._seconds)
            if self._ends is not None:
                left = self._ends - time.monotonic()
                if left <= 0:
                    raise too_late()
                timeout = left if timeout is None else min(timeout, left)
            return getattr(self._server, rpc)(message, metadata=self._metadata, timeout=timeout)

        return call


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of one HTTP request. `ends` is its deadline on the monotonic clock."""

    rpc: "RolloutServiceAsyncStub"
    metadata: CallMetadata
    ends: float | None
    _server: "RolloutServiceAsyncStub"
    _seconds: float

    async def run(self, start: RunRolloutRequest) -> tuple[str, Outcome]:
        """Runs or attaches to a rollout until it has finished; returns its uid and outcome.

        Cancelling the caller's task detaches from the rollout, which the server then ends after the grace time.
        Raises grpc.aio.AioRpcError and StreamEndedEarly.
        """
        call = self.rpc.RunRollout(start, timeout=None)
        uid, outcome = "", None
        try:
            async for item in call:
                if item.HasField("started"):
                    uid = item.started.rollout.uid
                elif item.event.HasField("finished"):
                    outcome = item.event.finished.outcome
        finally:
            # On a stream only this cancels; it does nothing once the stream has ended.
            call.cancel()
        if outcome is None:
            raise StreamEndedEarly(uid)
        return uid, outcome

    async def acknowledge(self, uid: str) -> None:
        """Tells the server that an outcome is on its way to its client.

        A failure costs nothing but memory: the same id is then answered with the same outcome once more. The request's
        deadline does not count: the client is being answered.
        """
        received = AcknowledgeOutcomeRequest(uid=uid)
        try:
            await self._server.AcknowledgeOutcome(received, metadata=self.metadata, timeout=self._seconds)
        except grpc.aio.AioRpcError as error:
            _LOG.warning("rollout %s: its outcome could not be acknowledged: %s", uid, error.code().name)


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The server, or a fleet of them, as the routes see it."""

    server: "RolloutServiceAsyncStub"
    settings: GatewaySettings

    def calls(self, request: Request, default_key: str = "") -> Calls:
        """The calls of a request; one without an Authorization header makes them under `default_key`, if there is one."""
        metadata, ends = call_metadata(request, default_key), getattr(request.state, "ends", None)
        seconds = self.settings.call_seconds
        # It has the methods of a stub.
        rpc = cast("RolloutServiceAsyncStub", BoundStub(self.server, metadata, ends, seconds))
        return Calls(rpc, metadata, ends, self.server, seconds)


def call_metadata(request: Request, default_key: str = "") -> CallMetadata:
    """What of an HTTP request travels on: who asks, the request id, and the trace it belongs to.

    Of W3C Trace Context, the state belongs to its parent and goes with it or not at all; its headers are one list.
    """
    metadata = {"x-request-id": request.state.request_id}
    authorization = request.headers.get("authorization", f"Bearer {default_key}" if default_key else None)
    if authorization is not None:
        # The empty credential equals no key, so the server decides as for any wrong one.
        metadata["authorization"] = authorization if _VISIBLE.fullmatch(authorization) else ""
    parent, state = request.headers.get("traceparent", ""), request.headers.getlist("tracestate")
    for name, value in (("traceparent", parent), ("tracestate", ",".join(filter(None, state)))):
        if not value or not _VISIBLE.fullmatch(value):
            break
        metadata[name] = value
    return tuple(metadata.items())


async def unless_hung_up(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Awaits `work`, but cancels it and raises ClientDisconnected when the client leaves. What is left of the body is dropped.

    FastAPI does not cancel a plain handler, so the client is watched here. Raises also what is wrong with the rest of the body.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            leaving.result()
            raise ClientDisconnected
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        # Also fetches the exception of work that failed in the moment the client left.
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

"""Calls to the rollout server on behalf of an HTTP request: metadata, deadline and cancellation."""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import grpc
from osmosis.rollout.v1.outcome_pb2 import Outcome
from osmosis.rollout.v1.rollout_service_pb2 import AcknowledgeOutcomeRequest, RunRolloutRequest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Receive

from rollout_gateway.fleet.errors import too_late
from rollout_gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub

_LOG = logging.getLogger(__name__)
# gRPC metadata is ASCII, and servers accept 8 KiB of it per call. No valid key or trace header is longer than this.
_VISIBLE: Final = re.compile(r"[ -~]{0,2048}")
_T = TypeVar("_T")

_DEADLINE: Final = "grpc-timeout"
_DEADLINE_FORMAT: Final = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNITS: Final[Mapping[str, float]] = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
# Eight digits of hours overflow gRPC's clock, and the deadline would count as expired.
_LONGEST_SECONDS: Final = 366 * 86_400.0
_MALFORMED: Final = f"The header {_DEADLINE} must be 1 to 8 digits and a unit (H, M, S, m, u or n), such as 30S or 500m"

CallMetadata = tuple[tuple[str, str], ...]


class ClientDisconnected(Exception):
    """The HTTP client disconnected before the response."""


class StreamEndedEarly(Exception):
    """The server closed a rollout's stream with status OK but without an outcome."""


def deadline(request: Request) -> float | None:
    """Return the deadline from a request's header `grpc-timeout`, as other HTTP gateways for gRPC do; None: no deadline.

    The time begins with the first call of this function. It ends calls, never a rollout: an expired stream detaches from it.
    Raises HTTPException 400 for a malformed header.
    """
    given = request.headers.getlist(_DEADLINE)
    if not given:
        return None
    found = _DEADLINE_FORMAT.fullmatch(given[0]) if len(given) == 1 else None
    if found is None:
        raise HTTPException(400, _MALFORMED)
    if not hasattr(request.state, "ends"):
        request.state.ends = time.monotonic() + min(int(found[1]) * _UNITS[found[2]], _LONGEST_SECONDS)
    return cast(float, request.state.ends)


class BoundStub:
    """Stub that adds a request's metadata and deadline to every call.

    `seconds` is the timeout of a call without one of its own; `timeout=None` means unlimited. Raises grpc.aio.AioRpcError with
    DEADLINE_EXCEEDED once the deadline has passed. gRPC itself would still send such a call, and a fast server would run it.
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
    """Calls of one HTTP request. `ends` is its deadline on the monotonic clock; None: no deadline.

    `uid` is the rollout whose key the request has; empty: it has an API key.
    """

    rpc: "RolloutServiceAsyncStub"
    metadata: CallMetadata
    ends: float | None
    _server: "RolloutServiceAsyncStub"
    _seconds: float
    uid: str = ""

    async def run(self, start: RunRolloutRequest) -> tuple[str, Outcome]:
        """Run a rollout, or attach to it, and wait until it has finished. Returns its uid and outcome.

        Cancelling the calling task detaches from the rollout. The server cancels the rollout after the grace time.
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
            # Leaving the loop does not cancel a grpc.aio stream. After its end, cancel() has no effect.
            call.cancel()
        if outcome is None:
            raise StreamEndedEarly(uid)
        return uid, outcome

    async def acknowledge(self, uid: str) -> None:
        """Report to the server that the client is about to receive the outcome.

        A failure only costs memory: the server keeps the outcome, and returns it again for the same id. The request's
        deadline does not apply, because the result is already there.
        """
        received = AcknowledgeOutcomeRequest(uid=uid)
        try:
            await self._server.AcknowledgeOutcome(received, metadata=self.metadata, timeout=self._seconds)
        except grpc.aio.AioRpcError as error:
            _LOG.warning("rollout %s: the outcome could not be acknowledged: %s", uid, error.code().name)


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The rollout server, or a fleet of servers, as the routes use it."""

    server: "RolloutServiceAsyncStub"
    settings: GatewaySettings
    #: The confirmations of completions under way, with the uids of their rollouts.
    confirmations: dict[asyncio.Task[None], str] = field(default_factory=dict)

    def calls(self, request: Request, default_key: str = "", uid: str = "") -> Calls:
        """Return the calls of a request. Without an Authorization header they use `default_key`, if that is not empty.

        With a `uid` the request has the key of that rollout. Raises HTTPException 400 for a malformed deadline.
        """
        metadata, ends = call_metadata(request, default_key, uid), deadline(request)
        seconds = self.settings.call_seconds
        # BoundStub forwards all methods of the stub.
        rpc = cast("RolloutServiceAsyncStub", BoundStub(self.server, metadata, ends, seconds))
        return Calls(rpc, metadata, ends, self.server, seconds, uid)


def call_metadata(request: Request, default_key: str = "", uid: str = "") -> CallMetadata:
    """Return the gRPC metadata for an HTTP request: credentials, request id and W3C Trace Context.

    With the `uid` of a rollout, whose key it must have, the key may also be in the header `x-api-key`.

    `tracestate` has no meaning without its `traceparent`, so it is dropped together with it. Several `tracestate` headers
    form one list (Trace Context, 3.3).
    """
    metadata = {"x-request-id": request.state.request_id}
    authorization = request.headers.get("authorization", f"Bearer {default_key}" if default_key else None)
    if uid and "x-api-key" in request.headers and not (authorization or "").startswith(f"Bearer rk_{uid}."):
        # A client that has both sends its own key, of another service, as one of them.
        authorization = f"Bearer {request.headers['x-api-key']}"
    if authorization is not None:
        # Metadata cannot carry every header. An empty credential matches no key, so the server refuses it like a wrong key.
        metadata["authorization"] = authorization if _VISIBLE.fullmatch(authorization) else ""
    parent, state = request.headers.get("traceparent", ""), request.headers.getlist("tracestate")
    for name, value in (("traceparent", parent), ("tracestate", ",".join(filter(None, state)))):
        if not value or not _VISIBLE.fullmatch(value):
            break
        metadata[name] = value
    return tuple(metadata.items())


async def unless_hung_up(request: Request, work: Awaitable[_T]) -> _T:
    """Await `work`, but cancel it and raise ClientDisconnected when the client disconnects.

    FastAPI does not cancel a plain handler on a disconnect, so this function watches the connection. It discards the rest of
    the body, and raises the HTTPException for a rest that is too large or too slow.
    """

    async def watch() -> Exception:
        reason = await left(request.receive)
        present.reschedule(0)
        return reason

    try:
        # The timeout tells its own cancellation of this task from others, and raises TimeoutError for it.
        async with asyncio.timeout(None) as present:
            leaving = asyncio.create_task(watch())
            try:
                return await work
            finally:
                leaving.cancel()
    except TimeoutError:
        if not present.expired():
            raise
        raise leaving.result() from None


async def left(receive: Receive) -> Exception:
    """Return ClientDisconnected once the client has disconnected, or what `receive` raises: HTTPException."""
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    except HTTPException as error:
        return error
    return ClientDisconnected()

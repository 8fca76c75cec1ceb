"""Calls to the rollout server on behalf of an HTTP client."""

import asyncio
import logging
import re
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import grpc
from osmosis.rollout.v1.outcome_pb2 import Outcome
from osmosis.rollout.v1.rollout_service_pb2 import AcknowledgeOutcomeRequest, RunRolloutRequest
from starlette.requests import Request

from rollout_gateway.fleet.errors import too_late
from rollout_gateway.http.deadlines import DeadlineMiddleware, seconds_left
from rollout_gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub

_LOG = logging.getLogger(__name__)
# gRPC carries only ASCII, and servers take 8 KiB of metadata for a call; no key and no trace is as long as this.
_VISIBLE: Final = re.compile(r"[ -~]{0,2048}")
_T = TypeVar("_T")

CallMetadata = tuple[tuple[str, str], ...]


class ClientDisconnected(Exception):
    """The HTTP client left before it could be answered."""


class StreamEndedEarly(Exception):
    """The server closed a rollout's stream with OK, but without an outcome."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The server, or a fleet of them, as the routes see it."""

    server: "RolloutServiceAsyncStub"
    settings: GatewaySettings

    @property
    def stub(self) -> "RolloutServiceAsyncStub":
        """What calls of the current request are made on: they end with its deadline, where it has one.

        Raises grpc.aio.AioRpcError, DEADLINE_EXCEEDED, once it has passed: gRPC would give a fast server a chance.
        """
        left = seconds_left()
        if left is None:
            return self.server
        if left <= 0:
            raise too_late()
        return cast("RolloutServiceAsyncStub", DeadlineMiddleware(self.server, left))

    async def run(self, asked: RunRolloutRequest, metadata: CallMetadata) -> tuple[str, Outcome]:
        """Runs or attaches to a rollout until it has finished; returns its uid and outcome.

        Cancelling the caller's task detaches from the rollout, which the server then ends after the grace time.
        Raises grpc.aio.AioRpcError and StreamEndedEarly.
        """
        call = self.stub.RunRollout(asked, metadata=metadata)
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

    async def acknowledge(self, uid: str, metadata: CallMetadata) -> None:
        """Tells the server that an outcome is on its way to its client.

        A failure costs nothing but memory: the same id is then answered with the same outcome once more. The request's
        deadline does not count: the client is being answered.
        """
        try:
            await self.server.AcknowledgeOutcome(
                AcknowledgeOutcomeRequest(uid=uid), metadata=metadata, timeout=self.settings.call_seconds
            )
        except grpc.aio.AioRpcError as error:
            _LOG.warning("rollout %s: its outcome could not be acknowledged: %s", uid, error.code().name)


def call_metadata(request: Request, default_key: str = "") -> CallMetadata:
    """What of an HTTP request travels on: who asks, the request id, and the trace it belongs to.

    A request without an Authorization header is made under `default_key`, if there is one. Of W3C Trace Context, the state belongs
    to its parent and goes with it or not at all; its headers are one list.
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

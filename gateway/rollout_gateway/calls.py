"""Calls to the rollout server on behalf of an HTTP client."""

import asyncio
import logging
import re
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc
from osmosis.rollout.v1.outcome_pb2 import Outcome
from osmosis.rollout.v1.rollout_service_pb2 import AcknowledgeOutcomeRequest, RunRolloutRequest
from starlette.requests import Request

from rollout_gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub

_LOG = logging.getLogger(__name__)
_VISIBLE: Final = re.compile(r"[ -~]*")
_T = TypeVar("_T")

CallMetadata = tuple[tuple[str, str], ...]


class HungUp(Exception):
    """The HTTP client left before it could be answered."""


class StreamEndedEarly(Exception):
    """The server closed a rollout's stream with OK, but without an outcome."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The server as the routes see it."""

    stub: "RolloutServiceAsyncStub"
    settings: GatewaySettings

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

        A failure costs nothing but memory: the same id is then answered with the same outcome once more.
        """
        try:
            await self.stub.AcknowledgeOutcome(
                AcknowledgeOutcomeRequest(uid=uid), metadata=metadata, timeout=self.settings.call_seconds
            )
        except grpc.aio.AioRpcError as error:
            _LOG.warning("rollout %s: its outcome could not be acknowledged: %s", uid, error.code().name)


def call_metadata(request: Request) -> CallMetadata:
    """What of an HTTP request travels on: who asks, the request id, and the trace it belongs to."""
    metadata = [("x-request-id", request.state.request_id)]
    authorization = request.headers.get("authorization")
    if authorization is not None:
        # gRPC carries only ASCII. The empty credential equals no key, so the server decides as for any wrong one.
        metadata.append(("authorization", authorization if _VISIBLE.fullmatch(authorization) else ""))
    traceparent = request.headers.get("traceparent", "")
    if traceparent and _VISIBLE.fullmatch(traceparent):
        metadata.append(("traceparent", traceparent))
    return tuple(metadata)


async def unless_hung_up(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Awaits `work`, but cancels it and raises HungUp when the client leaves; the body must have been read.

    FastAPI does not cancel a plain handler, so the client is watched here.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            raise HungUp
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        # Also fetches the exception of work that failed in the moment the client left.
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

"""The plain API: a rollout's events as server-sent events, which survive broken connections on both sides."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Final

import grpc
from fastapi import APIRouter, Query
from osmosis.rollout.v1 import event_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rollout_gateway.calls import Rollouts, StreamEndedEarly, call_metadata, unless_hung_up
from rollout_gateway.follow import PAUSES, Events, RolloutFollower
from rollout_gateway.rest import enums
from rollout_gateway.rest import openapi as shown
from rollout_gateway.rest.event import frame
from rollout_gateway.rest.request import wrong
from rollout_gateway.rest.rollout_routes import Uid

_LOG = logging.getLogger(__name__)

LAST_EVENT_ID: Final = "Last-Event-ID"
_RETRY: Final = b"retry: 1000\n\n"
_KEEP_ALIVE: Final = b": keep-alive\n\n"
_MAX_SEQUENCE: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How long a stream is kept up in hard times, in seconds."""

    #: After so long without an event a comment is sent: proxies close connections on which nothing is said.
    keep_alive: float = 15.0
    #: Between the attempts to resume a call that broke.
    pauses: tuple[float, ...] = PAUSES


class EventsQuery(BaseModel):
    """Which events, and how much of them."""

    model_config = ConfigDict(extra="forbid")

    after: int = Field(0, ge=0, le=_MAX_SEQUENCE, description="Those after this sequence; Last-Event-ID goes first.")
    detail: enums.Detail = "messages"


_KINDS: Final = [kind.name for kind in event_pb2.RolloutEvent.DESCRIPTOR.oneofs_by_name["event"].fields]
_EVENT: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "sequence": {"type": "integer"},
        "time": {"type": ["string", "null"], "format": "date-time"},
        "event": {"type": "string", "enum": _KINDS},
        "turn": {"type": "integer"},
        "segment_id": {"type": "string"},
    },
    "required": ["sequence", "time", "event", "turn", "segment_id"],
}
_ACCEPTED: Final = (
    '{"sequence":1,"time":"2026-01-02T03:04:05.678901Z","event":"accepted","turn":0,"segment_id":"",'
    '"messages":1,"agent":"calculator","agent_version":"1"}'
)
_STREAM: Final[dict[str, Any]] = {
    "description": "The events, until the rollout has finished. `id` is the sequence, `event` the kind, `data` one JSON object.",
    "content": {
        "text/event-stream": {
            # Of OpenAPI 3.2; in 3.1 nothing can be said of the items of a stream.
            "itemSchema": {
                "type": "object",
                "properties": {
                    "id": {"type": "string"},
                    "event": {"type": "string", "enum": _KINDS},
                    "data": {
                        "type": "string",
                        "contentMediaType": "application/json",
                        "contentSchema": _EVENT,
                    },
                },
                "required": ["event", "data"],
            },
            "example": f"retry: 1000\n\nid: 1\nevent: accepted\ndata: {_ACCEPTED}\n\n",
        }
    },
}
_RESUME_HEADER: Final = {
    "name": LAST_EVENT_ID,
    "in": "header",
    "required": False,
    "description": "The last event that was seen, as an EventSource sends it when it reconnects.",
    "schema": {"type": "string", "pattern": "^[0-9]{1,20}$"},
}


def events_router(rollouts: Rollouts, patience: StreamLimits = StreamLimits()) -> APIRouter:
    """The route of the stream."""
    router = APIRouter(prefix="/v1/rollouts", tags=["rollouts"], default_response_class=Response)
    responses = {
        200: _STREAM,
        204: {"description": "The rollout has finished and its last event was seen: do not reconnect."},
        **shown.errors(404),
    }

    @router.get("/{uid}/events", responses=responses, openapi_extra={"parameters": [_RESUME_HEADER]})
    async def watch_rollout(request: Request, uid: Uid, query: Annotated[EventsQuery, Query()]) -> Response:
        """Follows a rollout.

        A client that reconnects with the last id that it saw loses nothing and hears nothing twice. Leaving detaches from the
        rollout, as leaving any stream does.
        """
        after = _after(request, query.after)
        asked = pb.WatchRolloutRequest(
            uid=uid, after_sequence=after, detail=enums.value_of(enums.DETAILS, query.detail)
        )
        following = RolloutFollower(rollouts, asked, call_metadata(request), patience.pauses)
        opened = await unless_hung_up(request, following.open())
        if opened is None:
            return Response(status_code=204)
        return EventStream(opened, asked.detail, patience.keep_alive)

    return router


def _after(request: Request, after: int) -> int:
    """The sequence to go on after."""
    last = request.headers.get(LAST_EVENT_ID, "")
    if not last:
        return after
    if not (last.isascii() and last.isdecimal() and len(last) <= 20 and int(last) <= _MAX_SEQUENCE):
        raise wrong("header", LAST_EVENT_ID, "must be the id of an event of this rollout, a number")
    return int(last)


class EventStream(Response):
    """A response of server-sent events.

    It ends with the events, when the client leaves, and where the server cannot be reached any more: the client then comes
    back and is told why.
    """

    media_type = "text/event-stream"

    def __init__(self, events: Events, detail: int, keep_alive_seconds: float) -> None:
        headers: Mapping[str, str] = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(headers=headers)
        # It has a length only once it is over.
        del self.headers["content-length"]
        self._events = events
        self._detail = detail
        self._keep_alive_seconds = keep_alive_seconds
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends events until they end or the client leaves."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await self._write(send, _RETRY)
        sending = asyncio.create_task(self._send_events(send, scope["state"]["request_id"]))
        others = [asyncio.create_task(self._keep_alive(send)), asyncio.create_task(_left(receive))]
        try:
            await asyncio.wait((sending, others[1]), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            for task in (sending, *others):
                task.cancel()
            await asyncio.gather(sending, *others, return_exceptions=True)

    async def _send_events(self, send: Send, request_id: str) -> None:
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await self._write(send, frame(event, self._detail))
        except (grpc.aio.AioRpcError, StreamEndedEarly) as error:
            why = error.code().name if isinstance(error, grpc.aio.AioRpcError) else "ended early"
            _LOG.warning("request %s: a stream of events broke off: %s", request_id, why)

    async def _keep_alive(self, send: Send) -> None:
        while True:
            quiet = asyncio.get_running_loop().time() - self._last_sent
            if quiet >= self._keep_alive_seconds:
                await self._write(send, _KEEP_ALIVE)
            else:
                await asyncio.sleep(self._keep_alive_seconds - quiet)

    async def _write(self, send: Send, content: bytes) -> None:
        self._last_sent = asyncio.get_running_loop().time()
        if content:
            await send({"type": "http.response.body", "body": content, "more_body": True})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

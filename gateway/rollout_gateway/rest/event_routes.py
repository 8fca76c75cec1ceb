"""The plain API: a rollout's events as server-sent events, which survive broken connections on both sides."""

from dataclasses import dataclass
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query
from osmosis.rollout.v1 import event_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from rollout_gateway.calls import Rollouts, call_metadata, unless_hung_up
from rollout_gateway.follow import PAUSES, RolloutFollower
from rollout_gateway.rest import enums
from rollout_gateway.rest import openapi as shown
from rollout_gateway.rest.request import wrong
from rollout_gateway.rest.rollout_routes import Uid
from rollout_gateway.rest.sse import EventStream

LAST_EVENT_ID: Final = "Last-Event-ID"
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
_EVENT: Final = shown.obj(
    "What all events have, beside the fields of their kind.",
    {
        "sequence": shown.INTEGER,
        "time": {"type": ["string", "null"], "format": "date-time"},
        "event": shown.words(*_KINDS),
        "turn": shown.INTEGER,
        "segment_id": shown.TEXT,
    },
)
_DATA: Final = {"type": "string", "contentMediaType": "application/json", "contentSchema": _EVENT}
_ACCEPTED: Final = (
    '{"sequence":1,"time":"2026-01-02T03:04:05.678901Z","event":"accepted","turn":0,"segment_id":"",'
    '"messages":1,"agent":"calculator","agent_version":"1"}'
)
_STREAM: Final[dict[str, Any]] = {
    "description": "The events, until the rollout has finished. `id` is the sequence, `event` the kind, `data` one JSON object.",
    "content": {
        "text/event-stream": {
            # Of OpenAPI 3.2; in 3.1 nothing can be said of the items of a stream.
            "itemSchema": shown.obj("An event.", {"event": shown.words(*_KINDS), "data": _DATA}, {"id": shown.TEXT}),
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
        detail = enums.value_of(event_pb2.EventDetail.DESCRIPTOR, query.detail)
        watch = pb.WatchRolloutRequest(uid=uid, after_sequence=after, detail=detail)
        follower = RolloutFollower(rollouts, watch, call_metadata(request), patience.pauses)
        opened = await unless_hung_up(request, follower.open())
        if opened is None:
            return Response(status_code=204)
        return EventStream(opened, detail, patience.keep_alive, request.state.request_id)

    return router


def _after(request: Request, after: int) -> int:
    """The sequence to go on after."""
    last = request.headers.get(LAST_EVENT_ID, "")
    if not last:
        return after
    if not (last.isascii() and last.isdecimal() and len(last) <= 20 and int(last) <= _MAX_SEQUENCE):
        raise wrong("header", LAST_EVENT_ID, "must be the id of an event of this rollout, a number")
    return int(last)

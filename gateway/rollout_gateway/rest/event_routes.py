"""REST API: a rollout's events as server-sent events (WHATWG HTML, 9.2). Broken connections resume on both sides."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final

import grpc
import msgspec
from fastapi import APIRouter, Query
from osmosis.rollout.v1 import event_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from pydantic import BaseModel, ConfigDict, Field
from rollout_client.enums import Detail, enum_values
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Send

from rollout_gateway import openapi as shown
from rollout_gateway.calls import Rollouts, StreamEndedEarly, unless_hung_up
from rollout_gateway.follow_rollout import PAUSES, Events, RolloutFollower
from rollout_gateway.rest.proto_json import event_json
from rollout_gateway.rest.request import wrong
from rollout_gateway.rest.rollout_routes import Uid

_LOG = logging.getLogger(__name__)
_RETRY: Final = b"retry: 1000\n\n"
_KEEP_ALIVE: Final = b": keep-alive\n\n"
_BEYOND_ASCII: Final = re.compile(r"[^\x00-\x7f]")
_BREAKS: Final = str.maketrans("\r\n", "  ")
ToJson = Callable[[Any], dict[str, Any] | None]
LAST_EVENT_ID: Final = "Last-Event-ID"
_MAX_SEQUENCE: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Times of an event stream, in seconds."""

    #: After this time without an event the stream sends a comment: proxies close idle connections.
    keep_alive: float = 15.0
    #: Pauses between attempts to resume a broken call to the rollout server.
    pauses: tuple[float, ...] = PAUSES


class EventsQuery(BaseModel):
    """Which events to send, and in how much detail."""

    model_config = ConfigDict(extra="forbid")

    after: int = Field(0, ge=0, le=_MAX_SEQUENCE, description="Start after this sequence; Last-Event-ID overrides it.")
    detail: Detail = "messages"


def events_router(rollouts: Rollouts, limits: StreamLimits = StreamLimits()) -> APIRouter:
    """Return the route of the event stream."""
    router = APIRouter(prefix="/v1/rollouts", tags=["rollouts"], default_response_class=Response)
    responses = {
        200: shown.EVENT_STREAM,
        204: {"description": "The rollout has finished and the client has its last event: do not reconnect."},
        **shown.errors(404),
    }

    @router.get("/{uid}/events", responses=responses, openapi_extra=shown.header(LAST_EVENT_ID))
    async def watch_rollout(request: Request, uid: Uid, query: Annotated[EventsQuery, Query()]) -> Response:
        """Follow a rollout's events as server-sent events, until it has finished.

        A client that reconnects with its last event id misses no event and receives none twice. Disconnecting detaches from
        the rollout.
        """
        after = first_after(request, query.after)
        detail = enum_values(event_pb2.EventDetail.DESCRIPTOR)[query.detail]
        watch = pb.WatchRolloutRequest(uid=uid, after_sequence=after, detail=detail)
        follower = RolloutFollower(rollouts.calls(request), watch, limits.pauses)
        opened = await unless_hung_up(request, follower.open())
        if opened is None:
            return Response(status_code=204)
        return EventStream(opened, partial(event_json, detail=detail), limits.keep_alive, request.state.request_id)

    return router


def first_after(request: Request, after: int) -> int:
    """Return the sequence number after which the stream starts."""
    last = request.headers.get(LAST_EVENT_ID, "")
    if not last:
        return after
    if not (last.isascii() and last.isdecimal() and len(last) <= 20 and int(last) <= _MAX_SEQUENCE):
        raise wrong("header", LAST_EVENT_ID, "must be the id of an event of this rollout, a number")
    return int(last)


def frame(sequence: int, found: dict[str, Any] | None) -> bytes:
    """Return the frame of an event: `id` is its sequence, `event` its kind, `data` its JSON on one line of ASCII.

    An event that is not recorded has no id. An event of an unknown kind becomes a frame with only an id: SSE clients store the
    id and dispatch no event.
    """
    identity = f"id: {sequence}\n" if sequence else ""
    if found is None:
        return f"{identity}\n".encode() if identity else b""
    return f"{identity}event: {found['event']}\ndata: {one_line(msgspec.json.encode(found).decode())}\n\n".encode()


def one_line(text: str) -> str:
    """Return a JSON text without line breaks and in ASCII, because SSE clients differ in line breaks and decoding.

    In JSON, raw line breaks occur only between tokens, where a space is equivalent. Other non-ASCII characters occur only in
    strings, where an escape is equivalent.
    """
    text = text.translate(_BREAKS) if "\n" in text or "\r" in text else text
    return text if text.isascii() else _BEYOND_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text)


class EventStream(StreamingResponse):
    """Response of server-sent events.

    It ends after the last event, when the client disconnects, and when the server becomes unreachable. In the last case the
    client reconnects and receives the error as a status. After `keep_alive_seconds` without an event it sends a comment.
    """

    media_type = "text/event-stream"

    def __init__(self, events: Events, show: ToJson, keep_alive_seconds: float, request_id: str) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        self._frames = _frames(events, show, request_id)
        super().__init__(self._frames, headers=headers)
        self._keep_alive_seconds = keep_alive_seconds
        self._last_sent = 0.0

    async def stream_response(self, send: Send) -> None:
        """Send the events, and a comment after each idle period."""

        async def write(message: Message) -> None:
            self._last_sent = asyncio.get_running_loop().time()
            await send(message)

        comments = asyncio.create_task(self._keep_alive(write))
        try:
            async with aclosing(self._frames):
                await super().stream_response(write)
        finally:
            comments.cancel()
            await asyncio.gather(comments, return_exceptions=True)

    async def _keep_alive(self, send: Send) -> None:
        while True:
            quiet = asyncio.get_running_loop().time() - self._last_sent
            if quiet >= self._keep_alive_seconds:
                await send({"type": "http.response.body", "body": _KEEP_ALIVE, "more_body": True})
            else:
                await asyncio.sleep(self._keep_alive_seconds - quiet)


async def _frames(events: Events, show: ToJson, request_id: str) -> AsyncGenerator[bytes, None]:
    yield _RETRY
    try:
        async with aclosing(events):
            async for event in events:
                if content := frame(event.sequence, show(event)):
                    yield content
    except (grpc.aio.AioRpcError, StreamEndedEarly) as error:
        why = error.code().name if isinstance(error, grpc.aio.AioRpcError) else "ended early"
        _LOG.warning("request %s: the event stream was interrupted: %s", request_id, why)

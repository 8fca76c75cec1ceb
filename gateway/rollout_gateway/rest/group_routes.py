"""REST API: groups of rollouts: starting, reading and following them. They are cancelled as rollouts, by `group_id`."""

from functools import partial
from typing import Annotated, Final

from fastapi import APIRouter, Path, Query
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.group_pb2 import GetGroupRequest, StartGroupRequest
from pydantic import BaseModel, ConfigDict, Field
from rollout_client.enums import View, enum_values
from starlette.requests import Request
from starlette.responses import Response

from rollout_gateway import openapi as shown
from rollout_gateway.calls import Rollouts, unless_hung_up
from rollout_gateway.follow_rollout import RolloutFollower
from rollout_gateway.http.request_body import RequestBodies
from rollout_gateway.json_body import read_body
from rollout_gateway.rest import body
from rollout_gateway.rest.event_routes import LAST_EVENT_ID, EventStream, StreamLimits, first_after
from rollout_gateway.rest.proto_json import group_item_json, response_json
from rollout_gateway.rest.request import IDEMPOTENCY_KEY, group_request
from rollout_gateway.rest.rollout_routes import NO_QUERY

_START: Final = shown.raw_body(body.StartGroup) | shown.header(IDEMPOTENCY_KEY)
_STARTED: Final[shown.Responses] = shown.errors(404, 409) | {
    200: shown.json_response("StartGroupResponseModel", "The request id belongs to this existing group."),
    201: shown.json_response("StartGroupResponseModel", "All rollouts of the group were accepted."),
}
_DONE: Final = {"description": "The group has ended and the client has its result: do not reconnect."}
_STREAM: Final[shown.Responses] = {200: shown.GROUP_STREAM, 204: _DONE, **shown.errors(404)}
_READ: Final[shown.Responses] = {200: shown.json_response("GroupModel"), **shown.errors(404)}
GroupId = Annotated[str, Path(max_length=256, description="Id of the group.")]


class OutcomesQuery(BaseModel):
    """Which outcomes to send, and in how much detail."""

    model_config = ConfigDict(extra="forbid")

    after: int = Field(0, ge=0, le=2**64 - 1, description="Start after this sequence; Last-Event-ID overrides it.")
    view: View = "basic"


def groups_router(rollouts: Rollouts, intake: RequestBodies) -> APIRouter:
    """Return the routes below `/v1/groups`."""
    router = APIRouter(prefix="/v1/groups", tags=["groups"], default_response_class=Response)

    @router.post("", status_code=201, responses=_STARTED, openapi_extra=_START, dependencies=[NO_QUERY])
    async def start_group(request: Request) -> Response:
        """Start rollouts of one prompt, all or none. A repeated request with the same request id returns the existing group."""

        def parse(content: bytes) -> StartGroupRequest:
            return group_request(read_body(content, body.StartGroup), request.headers.get(IDEMPOTENCY_KEY))

        calls = rollouts.calls(request)
        start = await intake.read(request, calls, parse)
        started = await calls.rpc.StartGroup(start, timeout=None)
        return Response(response_json(started), 200 if started.attached else 201, media_type="application/json")

    # A caller's group id may contain slashes. The longer path comes first.
    @router.get("/{group_id:path}/events", responses=_STREAM, openapi_extra=shown.header(LAST_EVENT_ID))
    async def watch_group(request: Request, group_id: GroupId, query: Annotated[OutcomesQuery, Query()]) -> Response:
        """Follow the outcomes of a group as server-sent events, and its result. Disconnecting detaches from its rollouts."""
        view = enum_values(pb.RolloutView.DESCRIPTOR)[query.view]
        watch = pb.WatchGroupRequest(group_id=group_id, after_sequence=first_after(request, query.after), view=view)
        opened = await unless_hung_up(request, RolloutFollower(rollouts.calls(request), watch).open())
        if opened is None:
            return Response(status_code=204)
        show = partial(group_item_json, view=view)
        return EventStream(opened, show, StreamLimits().keep_alive, request.state.request_id)

    @router.get("/{group_id:path}", responses=_READ, dependencies=[NO_QUERY])
    async def get_group(request: Request, group_id: GroupId) -> Response:
        """Read a group: the uids of its rollouts and, once it has ended, its result."""
        found = await rollouts.calls(request).rpc.GetGroup(GetGroupRequest(group_id=group_id))
        return Response(response_json(found.group), media_type="application/json")

    return router

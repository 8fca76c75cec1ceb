"""The plain API: starting, reading and ending rollouts."""

from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Depends, Path, Query
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from rollout_gateway.calls import Rollouts, call_metadata, unless_hung_up
from rollout_gateway.http.request_body import RequestBodies
from rollout_gateway.osmosis_http.openapi import raw_body
from rollout_gateway.rest import body, enums
from rollout_gateway.rest import openapi as shown
from rollout_gateway.rest.examples import CANCEL_EXAMPLES, CANCEL_ONE_EXAMPLES, START_EXAMPLES
from rollout_gateway.rest.request import (
    IDEMPOTENCY_KEY,
    cancel_request,
    duration,
    labels,
    start_request,
    wrong,
)
from rollout_gateway.rest.rollout import page_answer, rollout_answer, started_answer

_JSON: Final = "application/json"
# URLs have a limit of their own.
_MAX_ASKED: Final = 100
# One of a fleet has a part for each of its servers; it leaves room in the line of the request, see `ConnectionLimits`.
_MAX_TOKEN: Final = 12_288
_Word = Annotated[str, Field(max_length=256)]

Uid = Annotated[str, Path(pattern=body.UID_PATTERN, description="The server's id of the rollout.")]


class ListQuery(BaseModel):
    """Which rollouts, and how much of them. Every condition that is set must hold."""

    model_config = ConfigDict(extra="forbid")

    state: list[enums.State] = Field([], max_length=8, description="In one of these states.")
    delivery: list[enums.DeliveryState] = Field([], max_length=8, description="With a delivery in one of these states.")
    agent: _Word = Field("", description="Of this agent.")
    group_id: _Word = Field("", description="Of this group.")
    rollout_id: list[_Word] = Field([], max_length=_MAX_ASKED, description="One of these.")
    uid: list[body.Uid] = Field([], max_length=_MAX_ASKED, description="One of these.")
    label: list[Annotated[str, Field(max_length=520)]] = Field(
        [], max_length=64, description="KEY=VALUE; with all of these labels."
    )
    caller: list[_Word] = Field([], max_length=_MAX_ASKED, description="Others than yourself need an admin key.")
    page_size: int = Field(100, ge=1, le=1000)
    page_token: str = Field("", max_length=_MAX_TOKEN, description="From the page before.")
    view: enums.View = "basic"


class GetQuery(BaseModel):
    """How much of a rollout, and how long to wait for its end."""

    model_config = ConfigDict(extra="forbid")

    view: enums.View = "basic"
    wait: float = Field(0, ge=0, le=3600, description="Seconds; answers when it has finished, or then.")


_IDEMPOTENCY: Final = {
    "name": IDEMPOTENCY_KEY,
    "in": "header",
    "required": False,
    "description": "The request id, where the body has none.",
    "schema": {"type": "string", "maxLength": 256},
}
_LOCATION: Final = {"Location": {"description": "The rollout's path.", "schema": {"type": "string"}}}


async def _no_query(request: Request) -> None:
    for key in request.query_params:
        raise wrong("query", key, "is not known here")


#: For routes that take no query: what is sent there all the same was meant to say something.
NO_QUERY: Final = Depends(_no_query)


def rollouts_router(rollouts: Rollouts, intake: RequestBodies) -> APIRouter:
    """The routes for rollouts."""
    router = APIRouter(prefix="/v1/rollouts", tags=["rollouts"], default_response_class=Response)
    _add_reading(router, rollouts)
    _add_starting(router, rollouts, intake)
    _add_ending(router, rollouts, intake)
    return router


def _add_starting(router: APIRouter, rollouts: Rollouts, intake: RequestBodies) -> None:
    responses = {
        200: {
            "model": shown.Started,
            "headers": _LOCATION,
            "description": "A rollout was found under the request id.",
        },
        201: {"model": shown.Started, "headers": _LOCATION, "description": "The rollout was accepted."},
        **shown.errors(404, 409),
    }
    extra = raw_body(body.StartRollout, {"examples": START_EXAMPLES}) | {"parameters": [_IDEMPOTENCY]}

    @router.post("", status_code=201, responses=responses, openapi_extra=extra, dependencies=[NO_QUERY])
    async def start_rollout(request: Request) -> Response:
        """Starts a rollout, or finds the one that was started under the same request id: retries are safe with one."""

        def parse(content: bytes) -> pb.StartRolloutRequest:
            return start_request(body.read_body(content, body.StartRollout), request.headers.get(IDEMPOTENCY_KEY))

        metadata = call_metadata(request)
        asked = await intake.read(request, metadata, parse)
        # Without a deadline of ours: it would end the call and not the rollout, of which nobody then knew.
        started = await rollouts.stub.StartRollout(asked, metadata=metadata)
        place = f"{request.scope.get('root_path', '')}/v1/rollouts/{started.rollout.uid}"
        status = 200 if started.attached else 201
        return Response(started_answer(started), status, {"location": place}, _JSON)


def _add_reading(router: APIRouter, rollouts: Rollouts) -> None:
    @router.get("", responses={200: {"model": shown.Page}, **shown.errors()})
    async def list_rollouts(request: Request, query: Annotated[ListQuery, Query()]) -> Response:
        """Rollouts page by page, newest first. Those that start meanwhile do not disturb the pages."""
        asked = _list_request(query)
        page = await rollouts.stub.ListRollouts(
            asked, metadata=call_metadata(request), timeout=rollouts.settings.call_seconds
        )
        return Response(page_answer(page, asked.view), media_type=_JSON)

    @router.get("/{uid}", responses={200: {"model": shown.RolloutModel}, **shown.errors(404)})
    async def get_rollout(request: Request, uid: Uid, query: Annotated[GetQuery, Query()]) -> Response:
        """One rollout as it is now, or once it has finished: waiting counts as being attached, hanging up ends it."""
        view = enums.value_of(enums.VIEWS, query.view)
        metadata, patience = call_metadata(request), rollouts.settings.call_seconds
        found: pb.GetRolloutResponse | pb.WaitRolloutResponse
        if query.wait:
            waited = pb.WaitRolloutRequest(uid=uid, timeout=duration(query.wait), view=view)
            call = rollouts.stub.WaitRollout(waited, metadata=metadata, timeout=query.wait + patience)
            found = await unless_hung_up(request, _answer_of(call))
        else:
            asked = pb.GetRolloutRequest(uid=uid, view=view)
            found = await rollouts.stub.GetRollout(asked, metadata=metadata, timeout=patience)
        return Response(rollout_answer(found.rollout, view), media_type=_JSON)


def _add_ending(router: APIRouter, rollouts: Rollouts, intake: RequestBodies) -> None:
    responses = {200: {"model": shown.Cancelled}, **shown.errors(404)}

    async def cancel(request: Request, parse: Callable[[bytes], pb.CancelRolloutsRequest]) -> Response:
        metadata = call_metadata(request)
        asked = await intake.read(request, metadata, parse)
        cancelled = await rollouts.stub.CancelRollouts(asked, metadata=metadata, timeout=rollouts.settings.call_seconds)
        return Response(msgspec.json.encode({"uids": list(cancelled.uids)}), media_type=_JSON)

    many = raw_body(body.CancelRollouts, {"examples": CANCEL_EXAMPLES})

    @router.post("/cancel", responses=responses, openapi_extra=many, dependencies=[NO_QUERY])
    async def cancel_rollouts(request: Request) -> Response:
        """Asks the selected rollouts to end. Those that have finished stay as they are."""
        return await cancel(request, lambda content: cancel_request(body.read_body(content, body.CancelRollouts)))

    one = raw_body(body.CancelOne, {"examples": CANCEL_ONE_EXAMPLES}, required=False)

    @router.post("/{uid}/cancel", responses=responses, openapi_extra=one, dependencies=[NO_QUERY])
    async def cancel_rollout(request: Request, uid: Uid) -> Response:
        """Asks one rollout to end. One that has finished stays as it is."""

        def parse(content: bytes) -> pb.CancelRolloutsRequest:
            reason = body.read_body(content, body.CancelOne).reason if content else None
            return cancel_request(body.CancelRollouts(uids=[uid], reason=reason))

        return await cancel(request, parse)

    @router.post("/{uid}/acknowledge", status_code=204, responses=shown.errors(404), dependencies=[NO_QUERY])
    async def acknowledge_outcome(request: Request, uid: Uid) -> Response:
        """Tells that the outcome was received, which ends its delivery."""
        await rollouts.stub.AcknowledgeOutcome(
            pb.AcknowledgeOutcomeRequest(uid=uid),
            metadata=call_metadata(request),
            timeout=rollouts.settings.call_seconds,
        )
        return Response(status_code=204)


async def _answer_of(call: Any) -> pb.WaitRolloutResponse:
    found: pb.WaitRolloutResponse = await call
    return found


def _list_request(query: ListQuery) -> pb.ListRolloutsRequest:
    selection = pb.Selection(
        uids=query.uid,
        rollout_ids=query.rollout_id,
        group_id=query.group_id,
        agent=query.agent,
        states=enums.values_of(enums.STATES, query.state),
        labels=labels(query.label),
        delivery_states=enums.values_of(enums.DELIVERIES, query.delivery),
        callers=query.caller,
    )
    return pb.ListRolloutsRequest(
        selection=selection,
        page_size=query.page_size,
        page_token=query.page_token,
        view=enums.value_of(enums.VIEWS, query.view),
    )

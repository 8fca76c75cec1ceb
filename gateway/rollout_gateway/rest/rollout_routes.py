"""REST API: starting, reading and cancelling rollouts."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Path, Query
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from pydantic import BaseModel, ConfigDict, Field
from rollout_client.enums import View, enum_values
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from rollout_gateway import openapi as shown
from rollout_gateway.calls import Rollouts, unless_hung_up
from rollout_gateway.http.request_body import RequestBodies
from rollout_gateway.json_body import read_body
from rollout_gateway.rest import body
from rollout_gateway.rest.proto_json import duration, response_json
from rollout_gateway.rest.request import IDEMPOTENCY_KEY, ListQuery, cancel_request, list_request, start_request, wrong

_JSON: Final = "application/json"
_LARGE: Final = 64 * 1024

Uid = Annotated[str, Path(pattern=body.UID_PATTERN, description="Id that the server gave the rollout.")]

Segment = Annotated[str, Path(max_length=64, description="Id of a segment of the rollout.")]


class GetQuery(BaseModel):
    """Level of detail, and how long to wait until the rollout has finished."""

    model_config = ConfigDict(extra="forbid")

    view: View = "basic"
    wait: float = Field(0, ge=0, le=3600, description="Seconds to wait until the rollout has finished.")


class TokensQuery(BaseModel):
    """Which tokens of the segment: from `start` to before `stop`, at most 4,096."""

    model_config = ConfigDict(extra="forbid")

    start: int = Field(0, ge=0, le=body.MAX_EXACT)
    stop: int = Field(0, ge=0, le=body.MAX_EXACT, description="0: as many tokens as there are, at most 4,096.")


_LOCATION: Final = {"headers": {"Location": {"description": "Path of the rollout.", "schema": shown.TEXT}}}
_STARTED: Final[shown.Responses] = {
    200: shown.json_response("StartRolloutResponseModel", "The request id belongs to this existing rollout.")
    | _LOCATION,
    201: shown.json_response("StartRolloutResponseModel", "The rollout was accepted.") | _LOCATION,
    **shown.errors(404, 409),
}
_CANCELLED: Final[shown.Responses] = {200: shown.json_response("CancelRolloutsResponseModel"), **shown.errors(404)}
_TEXTS: Final[shown.Responses] = {200: shown.json_response("DecodeTokensResponseModel"), **shown.errors(404)}
_ACCESS: Final[shown.Responses] = {200: shown.json_response("ModelAccessModel"), **shown.errors(400, 404)}
_START: Final = shown.raw_body(body.StartRollout) | shown.header(IDEMPOTENCY_KEY)
_CANCEL: Final = shown.raw_body(body.CancelRollouts)
_CANCEL_ONE: Final = shown.raw_body(body.CancelOne, required=False)


async def _json_response(message: Any, view: int = pb.ROLLOUT_VIEW_BASIC) -> Response:
    """Return the JSON of a message. Of a large one it is made in a thread, so that other requests do not wait for it."""
    large = message.ByteSize() > _LARGE
    content = await asyncio.to_thread(response_json, message, view) if large else response_json(message, view)
    return Response(content, media_type=_JSON)


async def _no_query(request: Request) -> None:
    for key in request.query_params:
        raise wrong("query", key, "is not known here; this path takes no query parameters")


#: For routes without query parameters: ignoring one would hide a mistake of the client.
NO_QUERY: Final = Depends(_no_query)


def rollouts_router(rollouts: Rollouts, intake: RequestBodies) -> APIRouter:
    """Return the routes below `/v1/rollouts`, except for events."""
    router = APIRouter(prefix="/v1/rollouts", tags=["rollouts"], default_response_class=Response)
    _add_reading(router, rollouts)
    _add_starting(router, rollouts, intake)
    _add_access(router, rollouts)
    _add_ending(router, rollouts, intake)
    return router


def _add_starting(router: APIRouter, rollouts: Rollouts, intake: RequestBodies) -> None:
    @router.post("", status_code=201, responses=_STARTED, openapi_extra=_START, dependencies=[NO_QUERY])
    async def start_rollout(request: Request) -> Response:
        """Start a rollout. A repeated request with the same request id returns the existing rollout, so retries are safe."""

        def parse(content: bytes) -> pb.StartRolloutRequest:
            return start_request(read_body(content, body.StartRollout), request.headers.get(IDEMPOTENCY_KEY))

        calls = rollouts.calls(request)
        start = await intake.read(request, calls, parse)
        # No timeout: it would end the call but not the rollout, and the client would not learn the uid.
        started = await calls.rpc.StartRollout(start, timeout=None)
        _complete_url(started.access, request)
        place = f"{request.scope.get('root_path', '')}/v1/rollouts/{started.rollout.uid}"
        return Response(response_json(started), 200 if started.attached else 201, {"location": place}, _JSON)


def _add_reading(router: APIRouter, rollouts: Rollouts) -> None:
    @router.get("", responses={200: shown.json_response("ListRolloutsResponseModel"), **shown.errors()})
    async def list_rollouts(request: Request, query: Annotated[ListQuery, Query()]) -> Response:
        """List rollouts in pages, newest first. Rollouts that start meanwhile do not shift the pages."""
        listing = list_request(query)
        page = await rollouts.calls(request).rpc.ListRollouts(listing)
        return await _json_response(page, listing.view)

    @router.get("/{uid}", responses={200: shown.json_response("RolloutModel"), **shown.errors(404)})
    async def get_rollout(request: Request, uid: Uid, query: Annotated[GetQuery, Query()]) -> Response:
        """Read a rollout, or wait until it has finished. A waiting client is attached; disconnecting detaches it."""
        view = enum_values(pb.RolloutView.DESCRIPTOR)[query.view]
        rpc = rollouts.calls(request).rpc
        found: pb.GetRolloutResponse | pb.WaitRolloutResponse
        if query.wait:
            wait = pb.WaitRolloutRequest(uid=uid, timeout=duration(query.wait), view=view)
            call = rpc.WaitRollout(wait, timeout=query.wait + rollouts.settings.call_seconds)
            found = await unless_hung_up(request, _result_of(call))
        else:
            found = await rpc.GetRollout(pb.GetRolloutRequest(uid=uid, view=view))
        return await _json_response(found.rollout, view)

    @router.get("/{uid}/segments/{segment}/tokens", responses=_TEXTS)
    async def decode_tokens(
        request: Request, uid: Uid, segment: Segment, query: Annotated[TokensQuery, Query()]
    ) -> Response:
        """Return the texts of tokens of a segment, of a running or finished rollout, if its spec names a tokenizer."""
        window = pb.DecodeTokensRequest(uid=uid, segment_id=segment, start=query.start, stop=query.stop)
        return await _json_response(await rollouts.calls(request).rpc.DecodeTokens(window))


def _add_access(router: APIRouter, rollouts: Rollouts) -> None:
    # A POST, so that no cache, history or log of GET requests has the key.
    @router.post("/{uid}/access", responses=_ACCESS, dependencies=[NO_QUERY])
    async def read_access(request: Request, uid: Uid) -> Response:
        """Return the access to a rollout's model endpoint, for rollouts of a group. Only if its agent runs elsewhere."""
        found = await rollouts.calls(request).rpc.GetRollout(pb.GetRolloutRequest(uid=uid, include_access=True))
        if not found.HasField("access"):
            raise HTTPException(
                400, "There is no access for an agent elsewhere: the rollout's agent runs on the server"
            )
        _complete_url(found.access, request)
        return Response(response_json(found.access), media_type=_JSON)


def _complete_url(access: pb.ModelAccess, request: Request) -> None:
    """Complete a base URL that is only a path: the server does not know its gateway's URL, but this client does."""
    if access.base_url.startswith("/"):
        access.base_url = str(request.base_url).rstrip("/") + access.base_url


def _add_ending(router: APIRouter, rollouts: Rollouts, intake: RequestBodies) -> None:
    async def cancel(request: Request, parse: Callable[[bytes], pb.CancelRolloutsRequest]) -> Response:
        calls = rollouts.calls(request)
        selected = await intake.read(request, calls, parse)
        return Response(response_json(await calls.rpc.CancelRollouts(selected)), media_type=_JSON)

    @router.post("/cancel", responses=_CANCELLED, openapi_extra=_CANCEL, dependencies=[NO_QUERY])
    async def cancel_rollouts(request: Request) -> Response:
        """Cancel the selected rollouts. Finished rollouts do not change."""
        return await cancel(request, lambda content: cancel_request(read_body(content, body.CancelRollouts).body))

    @router.post("/{uid}/cancel", responses=_CANCELLED, openapi_extra=_CANCEL_ONE, dependencies=[NO_QUERY])
    async def cancel_rollout(request: Request, uid: Uid) -> Response:
        """Cancel one rollout. A finished rollout does not change."""

        def parse(content: bytes) -> pb.CancelRolloutsRequest:
            reason = read_body(content, body.CancelOne).body.reason if content else None
            return cancel_request(body.CancelRollouts(uids=[uid], reason=reason))

        return await cancel(request, parse)

    @router.post("/{uid}/acknowledge", status_code=204, responses=shown.errors(404), dependencies=[NO_QUERY])
    async def acknowledge_outcome(request: Request, uid: Uid) -> Response:
        """Acknowledge that the outcome was received. This ends its delivery."""
        await rollouts.calls(request).rpc.AcknowledgeOutcome(pb.AcknowledgeOutcomeRequest(uid=uid))
        return Response(status_code=204)


async def _result_of(call: Any) -> pb.WaitRolloutResponse:
    found: pb.WaitRolloutResponse = await call
    return found

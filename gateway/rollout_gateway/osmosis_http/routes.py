"""Routes of the synchronous and the asynchronous HTTP API.

`POST /rollout` (synchronous) responds when the rollout has ended. `POST /v1/rollout/init` (asynchronous) responds at once, and
the server posts the result to the trainer when the rollout has ended.
"""

from collections.abc import Callable, Coroutine
from typing import Any, Final

import grpc
import msgspec
from fastapi import APIRouter
from fastapi.routing import APIRoute
from osmosis.rollout.v1.rollout_service_pb2 import (
    GetServerInfoRequest,
    GetServerInfoResponse,
    ListToolsRequest,
    RunRolloutRequest,
    StartRolloutRequest,
)
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollout_gateway import openapi as shown
from rollout_gateway.calls import Rollouts, unless_hung_up
from rollout_gateway.http.request_body import RequestBodies
from rollout_gateway.json_body import read_body
from rollout_gateway.key_check import STRANGER, KeyCheck
from rollout_gateway.osmosis_http.body import InitBody, RolloutBody
from rollout_gateway.osmosis_http.conversion import FIELDS, init_fields, init_request, run_request
from rollout_gateway.osmosis_http.outcome import rollout_response
from rollout_gateway.osmosis_http.trace import read_trace
from rollout_gateway.rest.proto_json import response_json
from rollout_gateway.status import Fields, Problem, problem

_JSON: Final = "application/json"
_SERVICE: Final = "rollout-server"

_ERRORS: Final = shown.dialect_errors(401, 403, 404, 414, 431, 500, 503, 504)
_START_ERRORS: Final[shown.Responses] = {
    **_ERRORS,
    **shown.dialect_errors(400, 408, 409, 413, 429),
    **shown.dialect_errors(422, schema="InvalidBodyResponse"),
}
_ENDED: Final = shown.json_response("RolloutResponse", "The rollout has ended; `status` says whether it failed.")
_ACCEPTED: Final = shown.json_response("InitResponse", "The rollout was accepted, by this or an earlier request.")
_TOOLS: Final[shown.Responses] = {200: shown.json_response("ToolsResponse"), **_ERRORS}
_HEALTH: Final[shown.Responses] = {
    200: shown.json_response("HealthResponse"),
    503: shown.json_response("UnhealthyResponse", "The rollout server is not available."),
}
_KEYED_HEALTH: Final[shown.Responses] = {
    **_HEALTH,
    401: shown.json_response("ErrorResponse", "The API key is missing or invalid."),
    404: shown.json_response("ErrorResponse", "The server requires no API keys."),
}
_BODY: Final = shown.raw_body(RolloutBody)
_INIT_BODY: Final = shown.raw_body(InitBody)


class _RequestRoute(APIRoute):
    """A route that calls its handler without FastAPI's work on parameters, if the request is the only one."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the function that serves a request."""
        return super().get_route_handler() if self.dependant.query_params else self.endpoint


def synchronous_router(rollouts: Rollouts, intake: RequestBodies) -> APIRouter:
    """Return the routes of the synchronous HTTP API."""
    router = APIRouter(tags=["synchronous HTTP API"], default_response_class=JSONResponse, route_class=_RequestRoute)

    @router.post("/rollout", responses={200: _ENDED, **_START_ERRORS}, openapi_extra=_BODY)
    async def run_rollout(request: Request) -> Response:
        """Run a rollout, and respond when it has ended.

        While it runs, a request with the same id and body attaches to it. Disconnecting detaches. The server cancels a rollout
        after a grace time without attached clients.
        """
        return await _run(request, rollouts, intake)

    @router.get("/tools", responses=_TOOLS)
    async def list_tools(request: Request, agent: str = "") -> Response:
        """List the tools of an agent; of the default agent if none is named."""
        calls = rollouts.calls(request, rollouts.settings.synchronous_key)
        found = await calls.rpc.ListTools(ListToolsRequest(agent=agent))
        return Response(response_json(found), media_type=_JSON)

    @router.get("/health", responses=_HEALTH)
    async def open_health(request: Request) -> Response:
        """Report whether rollouts can be run. Needs no API key."""
        try:
            return _health(await rollouts.calls(request).rpc.GetServerInfo(GetServerInfoRequest()))
        except grpc.aio.AioRpcError as error:
            return _unhealthy(error)

    return router


def asynchronous_router(rollouts: Rollouts, keys: KeyCheck, intake: RequestBodies) -> APIRouter:
    """Return the routes of the asynchronous HTTP API."""
    router = APIRouter(tags=["asynchronous HTTP API"], default_response_class=JSONResponse, route_class=_RequestRoute)
    responses: shown.Responses = {202: _ACCEPTED, **_START_ERRORS}

    @router.post("/v1/rollout/init", status_code=202, responses=responses, openapi_extra=_INIT_BODY)
    async def init_rollout(request: Request) -> Response:
        """Start a rollout, and respond at once with the tools for the model's prompt.

        When the rollout has ended, the server posts the result to {server_url}/v1/rollout/completed. A repeated request gets
        the same response and starts nothing.
        """
        return await _init(request, rollouts, intake)

    @router.get("/platform/health", responses=_KEYED_HEALTH)
    async def keyed_health(request: Request) -> Response:
        """Report whether rollouts can be run, and whether the request's API key is valid."""
        calls = rollouts.calls(request)
        try:
            server = await calls.rpc.GetServerInfo(GetServerInfoRequest())
            if not server.keys_required:
                return Problem(404, "Not found").response()
            await keys.demand(calls)
        except grpc.aio.AioRpcError as error:
            if error.code() in STRANGER:
                return Problem(401, "Invalid or missing API key", {"www-authenticate": "Bearer"}).response()
            return _unhealthy(error)
        return _health(server)

    return router


async def _run(request: Request, rollouts: Rollouts, intake: RequestBodies) -> Response:
    settings = rollouts.settings
    calls = rollouts.calls(request, settings.synchronous_key)

    def parse(content: bytes) -> tuple[RunRolloutRequest, bool]:
        parsed = read_body(content, RolloutBody, settings.max_metadata_bytes)
        return run_request(parsed, settings), parsed.body.metadata.debug_trace is True

    start, traced = await intake.read(request, calls, parse)
    request.state.fields = FIELDS

    async def run() -> tuple[str, bytes]:
        uid, outcome = await calls.run(start)
        trace = await read_trace(calls, uid) if traced else None
        return uid, rollout_response(start.start.spec.rollout_id, outcome, trace)

    uid, body = await unless_hung_up(request, run())
    # Before the response: a client that has it may reuse the rollout id at once.
    await calls.acknowledge(uid)
    return Response(body, media_type=_JSON, headers={"x-rollout-uid": uid})


async def _init(request: Request, rollouts: Rollouts, intake: RequestBodies) -> Response:
    calls = rollouts.calls(request)

    def parse(content: bytes) -> tuple[StartRolloutRequest, Fields]:
        parsed = read_body(content, InitBody, rollouts.settings.max_metadata_bytes)
        return init_request(parsed), init_fields(parsed.body)

    start, request.state.fields = await intake.read(request, calls, parse)
    # No timeout: it would end the call but not the rollout, and an agent may take long to set the rollout up.
    accepted = await calls.rpc.StartRollout(start, timeout=None)
    # An existing rollout may have another id than this request. A server that returns no spec leaves the request's.
    rollout_id = accepted.rollout.spec.rollout_id or start.spec.rollout_id
    content = {"rollout_id": rollout_id, "tools": [*map(msgspec.Raw, accepted.function_tools_json)]}
    return Response(msgspec.json.encode(content), 202, {"x-rollout-uid": accepted.rollout.uid}, _JSON)


def _health(server: GetServerInfoResponse) -> Response:
    if server.draining:
        return JSONResponse({"status": "draining", "service": _SERVICE}, 503)
    return JSONResponse(
        {
            "status": "healthy",
            "service": _SERVICE,
            "agent_loop": server.default_agent,
            "active_rollouts": server.running + server.queued,
            "completed_rollouts": server.finished,
        }
    )


def _unhealthy(error: grpc.aio.AioRpcError) -> Response:
    return JSONResponse({"status": "unhealthy", "service": _SERVICE, "detail": problem(error).detail}, 503)

"""The synchronous dialect: `POST /rollout` answers with the end of the rollout; `/tools` and `/health` beside it."""

from typing import Final

import grpc
from fastapi import APIRouter
from osmosis.rollout.v1.rollout_service_pb2 import ListToolsRequest, RunRolloutRequest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollout_gateway.calls import CallMetadata, Rollouts, call_metadata, unless_hung_up
from rollout_gateway.health import health
from rollout_gateway.http.request_body import RequestBodies
from rollout_gateway.osmosis_http.outcome import rollout_answer
from rollout_gateway.osmosis_http.sync_body import EXAMPLE, RolloutBody, parse_rollout
from rollout_gateway.osmosis_http.sync_conversion import FIELDS, run_request
from rollout_gateway.osmosis_http.trace import read_trace
from rollout_gateway.rest import openapi as shown
from rollout_gateway.rest.proto_json import response_json
from rollout_gateway.status import answer_failed_call

_ANSWERS: Final[shown.Responses] = {
    200: shown.answer("RolloutResponse", "The rollout ended, well or not: see `status`."),
    **shown.dialect_errors(400, 401, 404, 409, 413, 429, 500, 503),
    **shown.dialect_errors(422, schema="InvalidBodyResponse"),
}
_TOOLS_ANSWERS: Final[shown.Responses] = {200: shown.answer("ToolsResponse"), **shown.dialect_errors(401, 404, 503)}
_HEALTH_ANSWERS: Final[shown.Responses] = {
    200: shown.answer("HealthResponse"),
    503: shown.answer("UnhealthyResponse", "The rollout server is not available."),
}
_BODY: Final = shown.raw_body(RolloutBody, {"example": EXAMPLE})


def synchronous_router(rollouts: Rollouts, intake: RequestBodies) -> APIRouter:
    """The routes of the synchronous dialect."""
    router = APIRouter(tags=["synchronous dialect"])

    @router.post("/rollout", response_class=JSONResponse, responses=_ANSWERS, openapi_extra=_BODY)
    async def run_rollout(request: Request) -> Response:
        """Runs a rollout and answers when it has ended.

        While it runs, the same id with the same payload attaches to it. Hanging up detaches; with nobody attached the
        rollout is cancelled after a grace time.
        """
        return await _run_rollout(request, rollouts, intake)

    @router.get("/tools", response_class=JSONResponse, responses=_TOOLS_ANSWERS)
    async def list_tools(request: Request, agent: str = "") -> Response:
        """The tools of an agent, the default one if none is named."""
        found = await rollouts.stub.ListTools(
            ListToolsRequest(agent=agent), metadata=_metadata(request, rollouts), timeout=rollouts.settings.call_seconds
        )
        return Response(response_json(found), media_type="application/json")

    @router.get("/health", response_class=JSONResponse, responses=_HEALTH_ANSWERS)
    async def open_health(request: Request) -> Response:
        """Whether rollouts can be run. Open also where a key is demanded elsewhere."""
        return await health(rollouts, call_metadata(request))

    return router


def _metadata(request: Request, rollouts: Rollouts) -> CallMetadata:
    """This dialect can stay open where a key is demanded: callers without one then use the gateway's."""
    return call_metadata(request, rollouts.settings.synchronous_key)


async def _run_rollout(request: Request, rollouts: Rollouts, intake: RequestBodies) -> Response:
    metadata = _metadata(request, rollouts)

    def parse(content: bytes) -> tuple[RunRolloutRequest, bool]:
        parsed = parse_rollout(content, rollouts.settings.max_metadata_bytes)
        return run_request(parsed, rollouts.settings), parsed.body.metadata.debug_trace is True

    asked, traced = await intake.read(request, metadata, parse)
    rollout_id = asked.start.spec.rollout_id

    async def run() -> tuple[str, bytes]:
        uid, outcome = await rollouts.run(asked, metadata)
        trace = await read_trace(rollouts, uid, metadata) if traced else None
        return uid, rollout_answer(rollout_id, outcome, trace)

    try:
        uid, answer = await unless_hung_up(request, run())
    except grpc.aio.AioRpcError as error:
        return answer_failed_call(error, request.state.request_id, FIELDS)
    # Before the answer: a client that has it may use the id anew at once.
    await rollouts.acknowledge(uid, metadata)
    return Response(answer, media_type="application/json", headers={"x-rollout-uid": uid})

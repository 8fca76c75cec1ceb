"""The asynchronous dialect: `POST /v1/rollout/init` answers at once; the rollout calls back when it has ended."""

from dataclasses import replace
from typing import Final

import grpc
from fastapi import APIRouter
from osmosis.rollout.v1.rollout_service_pb2 import StartRolloutRequest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollout_gateway.calls import Rollouts, call_metadata
from rollout_gateway.health import platform_health
from rollout_gateway.http.request_body import RequestBodies
from rollout_gateway.key_check import KeyCheck
from rollout_gateway.osmosis_http.async_body import INIT_EXAMPLE, InitBody, parse_init
from rollout_gateway.osmosis_http.async_conversion import init_answer, init_fields, init_request
from rollout_gateway.rest import openapi as shown
from rollout_gateway.status import Fields, Problem, logged_problem

_ANSWERS: Final[shown.Responses] = {
    202: shown.answer("InitResponse", "The rollout was accepted, now or before."),
    **shown.dialect_errors(400, 401, 404, 409, 413, 429, 500, 503),
    **shown.dialect_errors(422, schema="InvalidBodyResponse"),
}
_HEALTH_ANSWERS: Final[shown.Responses] = {
    200: shown.answer("HealthResponse"),
    401: shown.answer("ErrorResponse", "This is not one of the server's keys."),
    404: shown.answer("ErrorResponse", "The server demands no key."),
    503: shown.answer("UnhealthyResponse", "The rollout server is not available."),
}
_BODY: Final = shown.raw_body(InitBody, {"example": INIT_EXAMPLE})


def asynchronous_router(rollouts: Rollouts, keys: KeyCheck, intake: RequestBodies) -> APIRouter:
    """The routes of the asynchronous dialect."""
    router = APIRouter(tags=["asynchronous dialect"])

    @router.post(
        "/v1/rollout/init", status_code=202, response_class=JSONResponse, responses=_ANSWERS, openapi_extra=_BODY
    )
    async def init_rollout(request: Request) -> Response:
        """Accepts a rollout and answers with the tools that its model is to be told.

        When the rollout has ended, POST {server_url}/v1/rollout/completed tells how. A repeated request gets the same
        answer and starts nothing.
        """
        return await _init(request, rollouts, intake)

    @router.get("/platform/health", response_class=JSONResponse, responses=_HEALTH_ANSWERS)
    async def keyed_health(request: Request) -> Response:
        """Whether rollouts can be run, and whether the request's key is one of the server's."""
        return await platform_health(rollouts, keys, call_metadata(request))

    return router


async def _init(request: Request, rollouts: Rollouts, intake: RequestBodies) -> Response:
    metadata = call_metadata(request)

    def parse(content: bytes) -> tuple[StartRolloutRequest, Fields]:
        parsed = parse_init(content, rollouts.settings.max_metadata_bytes)
        return init_request(parsed), init_fields(parsed.body)

    asked, fields = await intake.read(request, metadata, parse)
    try:
        # Without a deadline of ours: it would end the call and not the rollout, which an agent may take long to set up.
        accepted = await rollouts.stub.StartRollout(asked, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        return _refusal(error, request.state.request_id, fields).response()
    return Response(
        init_answer(asked.spec.rollout_id, accepted),
        202,
        media_type="application/json",
        headers={"x-rollout-uid": accepted.rollout.uid},
    )


def _refusal(error: grpc.aio.AioRpcError, request_id: str, fields: Fields) -> Problem:
    """What is wrong, each fault once: several fields of the request come from one of the body."""
    found = logged_problem(error, request_id, fields)
    if isinstance(found.detail, str):
        return found
    return replace(found, detail=list({(each["loc"], each["msg"]): each for each in found.detail}.values()))

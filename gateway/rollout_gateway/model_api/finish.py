"""The end of the work of an agent that runs elsewhere. Errors have the REST API's shape."""

from __future__ import annotations

from typing import Final

import msgspec
from fastapi import APIRouter
from osmosis.rollout.v1.agent_service_pb2 import FinishRolloutRequest
from osmosis.rollout.v1.outcome_pb2 import Failure, FailureClass
from starlette.requests import Request
from starlette.responses import Response

from rollout_gateway import openapi as shown
from rollout_gateway.calls import Rollouts
from rollout_gateway.http.request_body import RequestBodies
from rollout_gateway.json_body import ParsedBody, read_body
from rollout_gateway.model_api.delivery import agent_rpcs
from rollout_gateway.rest import enums
from rollout_gateway.rest.body import FinishRollout
from rollout_gateway.rest.rollout_routes import Uid

_RESPONSES: Final[shown.Responses] = {200: shown.json_response("FinishedModel"), **shown.errors(404, 409)}


def finish_request(uid: str, parsed: ParsedBody[FinishRollout]) -> FinishRolloutRequest:
    """Convert a valid body."""
    body, failure = parsed.body, None
    if body.failure is not None:
        failure = Failure(message=body.failure.message)
        if body.failure.failure_class is not None:
            failure.failure_class = enums.value_of(FailureClass.DESCRIPTOR, body.failure.failure_class)
    return FinishRolloutRequest(
        uid=uid, reward=body.reward, scores=body.scores or {}, extra_json=parsed.text("extra"), failure=failure
    )


def finish_route(router: APIRouter, rollouts: Rollouts, intake: RequestBodies) -> APIRouter:
    """Add the route that ends a rollout, and return the router."""

    @router.post("/finish", responses=_RESPONSES, openapi_extra=shown.raw_body(FinishRollout))
    async def finish_rollout(request: Request, uid: Uid) -> Response:
        """End the work of an agent that runs elsewhere: the rollout is rewarded and ends. Retries with the same body are safe."""
        calls = rollouts.calls(request, uid=uid)
        message = await intake.read(
            request, calls, lambda content: finish_request(uid, read_body(content, FinishRollout))
        )
        finished = await agent_rpcs(calls).FinishRollout(message, timeout=None)
        return Response(msgspec.json.encode({"repeated": finished.repeated}), media_type="application/json")

    return router

"""The synchronous dialect: `POST /rollout` answers with the end of the rollout; `/tools` and `/health` beside it."""

import asyncio
from typing import Any, Final

import grpc
from fastapi import APIRouter
from osmosis.rollout.v1.rollout_service_pb2 import (
    GetServerInfoRequest,
    GetServerInfoResponse,
    ListAgentsRequest,
    ListAgentsResponse,
    ListToolsRequest,
)
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollout_gateway import answers
from rollout_gateway.body import EXAMPLE, InvalidBody, RolloutBody, parse_rollout, violation
from rollout_gateway.calls import CallMetadata, Rollouts, call_metadata, unless_hung_up
from rollout_gateway.status import answer_failed_call, problem
from rollout_gateway.trace import read_trace
from rollout_gateway.wire import FIELDS, rollout_answer, run_request, tools_answer

_SERVICE: Final = "rollout-server"
_NEEDS_KEY: Final = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


def _error(description: str, model: type = answers.ErrorAnswer) -> dict[str, Any]:
    return {"description": description, "model": model}


_COMMON: Final[dict[int | str, dict[str, Any]]] = {
    401: _error("The server demands a key, and this is not one."),
    404: _error("There is no such agent."),
    503: _error("The rollout server is not available; try again after Retry-After."),
}
_ROLLOUT_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {"description": "The rollout ended, well or not: see `status`.", "model": answers.RolloutAnswer},
    **_COMMON,
    400: _error("This server cannot run such a rollout."),
    409: _error("A rollout with this id and another payload runs."),
    413: _error("The body is too large."),
    422: _error("The body does not validate; nobody was called.", answers.InvalidBodyAnswer),
    429: _error("Too many rollouts wait; try again after Retry-After."),
    500: _error("A fault of ours; the server's log has it under the x-request-id."),
}
# The handler reads the raw body, so FastAPI has to be told of its model.
_ROLLOUT_BODY: Final = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": f"#/components/schemas/{RolloutBody.__name__}"},
                "example": EXAMPLE,
            }
        },
    }
}


def synchronous_router(rollouts: Rollouts) -> APIRouter:
    """The routes of the synchronous dialect."""
    router = APIRouter(tags=["synchronous dialect"])

    @router.post("/rollout", response_class=JSONResponse, responses=_ROLLOUT_ANSWERS, openapi_extra=_ROLLOUT_BODY)
    async def run_rollout(request: Request) -> Response:
        """Runs a rollout and answers when it has ended.

        While it runs, the same id with the same payload attaches to it. Hanging up detaches; with nobody attached the
        rollout is cancelled after a grace time.
        """
        return await _run_rollout(request, rollouts)

    @router.get("/tools", response_class=JSONResponse, responses={200: {"model": answers.ToolsAnswer}, **_COMMON})
    async def list_tools(request: Request, agent: str = "") -> Response:
        """The tools of an agent, the default one if none is named."""
        found = await rollouts.stub.ListTools(
            ListToolsRequest(agent=agent), metadata=call_metadata(request), timeout=rollouts.settings.call_seconds
        )
        return Response(tools_answer(found.tools), media_type="application/json")

    health_answers: dict[int | str, dict[str, Any]] = {
        200: {"model": answers.HealthAnswer},
        503: _error("The rollout server is not available.", answers.UnhealthyAnswer),
    }

    @router.get("/health", response_class=JSONResponse, responses=health_answers)
    async def health(request: Request) -> Response:
        """Whether rollouts can be run. Open also where a key is demanded elsewhere."""
        return await _health(rollouts, call_metadata(request))

    return router


async def _run_rollout(request: Request, rollouts: Rollouts) -> Response:
    content = await request.body()
    _demand_json(request)
    parsed = parse_rollout(content, rollouts.settings.max_metadata_bytes)
    asked, metadata = run_request(parsed, rollouts.settings), call_metadata(request)
    traced = parsed.body.metadata.debug_trace is True

    async def run() -> tuple[str, bytes]:
        uid, outcome = await rollouts.run(asked, metadata)
        trace = await read_trace(rollouts, uid, metadata) if traced else None
        return uid, rollout_answer(parsed.body.rollout_id, outcome, trace)

    try:
        uid, answer = await unless_hung_up(request, run())
    except grpc.aio.AioRpcError as error:
        return answer_failed_call(error, request.state.request_id, FIELDS)
    # Before the answer: a client that has it may use the id anew at once.
    await rollouts.acknowledge(uid, metadata)
    return Response(answer, media_type="application/json", headers={"x-rollout-uid": uid})


def _demand_json(request: Request) -> None:
    """Refuses other content types, which a web page could send from a browser without being asked."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise InvalidBody([violation("content_type", (), "The Content-Type must be application/json")])


async def _health(rollouts: Rollouts, metadata: CallMetadata) -> Response:
    seconds = rollouts.settings.call_seconds
    calls: list[Any] = [
        rollouts.stub.GetServerInfo(GetServerInfoRequest(), metadata=metadata, timeout=seconds),
        rollouts.stub.ListAgents(ListAgentsRequest(), metadata=metadata, timeout=seconds),
    ]
    try:
        server, agents = await asyncio.gather(*calls)
    except grpc.aio.AioRpcError as error:
        if error.code() in _NEEDS_KEY:
            return JSONResponse({"status": "healthy", "service": _SERVICE})
        found = problem(error)
        return JSONResponse({"status": "unhealthy", "service": _SERVICE, "detail": found.detail}, 503)
    if server.draining:
        return JSONResponse({"status": "draining", "service": _SERVICE}, 503)
    return JSONResponse(_healthy(server, agents))


def _healthy(server: GetServerInfoResponse, agents: ListAgentsResponse) -> dict[str, Any]:
    default = [agent.name for agent in agents.agents if agent.default]
    return {
        "status": "healthy",
        "service": _SERVICE,
        "agent_loop": default[0] if default else "",
        "active_rollouts": server.running + server.queued,
        "completed_rollouts": server.finished,
    }

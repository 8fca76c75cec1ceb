"""`/health` and `/platform/health`: whether rollouts can be run, and how many there are."""

from typing import Final

import grpc
from osmosis.rollout.v1.rollout_service_pb2 import GetServerInfoRequest, GetServerInfoResponse
from starlette.responses import JSONResponse, Response

from rollout_gateway.calls import CallMetadata, Rollouts
from rollout_gateway.key_check import STRANGER, KeyCheck
from rollout_gateway.status import Problem, problem

_SERVICE: Final = "rollout-server"


async def health(rollouts: Rollouts, metadata: CallMetadata) -> Response:
    """The answer of `GET /health`: 503 where the server is away or drains."""
    try:
        return _told(await _server(rollouts, metadata))
    except grpc.aio.AioRpcError as error:
        return _unhealthy(error)


async def platform_health(rollouts: Rollouts, keys: KeyCheck, metadata: CallMetadata) -> Response:
    """The answer of `GET /platform/health`: the same for holders of a key, 404 where the server demands none."""
    try:
        server = await _server(rollouts, metadata)
        if not server.keys_required:
            return Problem(404, "Not found").response()
        await keys.demand(metadata)
    except grpc.aio.AioRpcError as error:
        if error.code() in STRANGER:
            return Problem(401, "Invalid or missing API key", {"www-authenticate": "Bearer"}).response()
        return _unhealthy(error)
    return _told(server)


async def _server(rollouts: Rollouts, metadata: CallMetadata) -> GetServerInfoResponse:
    return await rollouts.stub.GetServerInfo(
        GetServerInfoRequest(), metadata=metadata, timeout=rollouts.settings.call_seconds
    )


def _told(server: GetServerInfoResponse) -> Response:
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
    found = problem(error)
    return JSONResponse({"status": "unhealthy", "service": _SERVICE, "detail": found.detail}, 503)

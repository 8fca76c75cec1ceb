"""The plain API: what this service is, whether it is well, and its metrics."""

from collections.abc import Callable
from typing import Any, Final

import grpc
from fastapi import APIRouter
from osmosis.rollout.v1.rollout_service_pb2 import GetServerInfoRequest, ListAgentsRequest
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollout_gateway.calls import Rollouts, call_metadata
from rollout_gateway.counting import Meters
from rollout_gateway.resource import described as shown
from rollout_gateway.resource.rollout import agents_answer
from rollout_gateway.routes.rollouts import NO_QUERY
from rollout_gateway.strangers import KeyCheck

_RETRY_SECONDS: Final = "1"
_EXPOSITION: Final[dict[str, Any]] = {
    "description": "Metrics in Prometheus' text form.",
    "content": {"text/plain": {"schema": {"type": "string"}}},
}


def service_router(
    rollouts: Rollouts, keys: KeyCheck, meters: Meters, metrics: Callable[[], bytes] | None
) -> APIRouter:
    """The routes about the service; `metrics` gives the server's own, where it runs in this process."""
    router = APIRouter(tags=["service"], default_response_class=Response)

    @router.get("/v1/agents", responses={200: {"model": shown.Agents}, **shown.errors()}, dependencies=[NO_QUERY])
    async def list_agents(request: Request) -> Response:
        """The agents of this server, with their tools and limits."""
        listed = await rollouts.stub.ListAgents(
            ListAgentsRequest(), metadata=call_metadata(request), timeout=rollouts.settings.call_seconds
        )
        return Response(agents_answer(listed), media_type="application/json")

    @router.get("/healthz", responses={200: {"model": shown.Alive}})
    async def healthz() -> Response:
        """Whether this process answers. Asks nobody."""
        return JSONResponse({"status": "ok"})

    not_ready = {"model": shown.Unready, "description": "No rollout can be started now; try again after Retry-After."}

    @router.get("/readyz", responses={200: {"model": shown.Ready}, 503: not_ready})
    async def readyz(request: Request) -> Response:
        """Whether rollouts can be started. Open also where a key is demanded elsewhere."""
        return await _readyz(rollouts, request)

    @router.get("/metrics", responses={200: _EXPOSITION, **shown.errors()})
    async def read_metrics(request: Request) -> Response:
        """Metrics of the server and of the gateway. Needs a key where the server does; a gateway's own are open."""
        if metrics is None:
            return Response(meters.text(), media_type=CONTENT_TYPE_LATEST)
        await keys.demand(call_metadata(request))
        both = metrics().rstrip(b"\n") + b"\n" + meters.text()
        return Response(both, media_type=CONTENT_TYPE_LATEST)

    return router


async def _readyz(rollouts: Rollouts, request: Request) -> Response:
    try:
        server = await rollouts.stub.GetServerInfo(
            GetServerInfoRequest(), metadata=call_metadata(request), timeout=rollouts.settings.call_seconds
        )
    except grpc.aio.AioRpcError:
        return _unready("unavailable")
    if server.draining:
        return _unready("draining")
    return JSONResponse({"status": "ready", "running": server.running, "queued": server.queued})


def _unready(status: str) -> Response:
    return JSONResponse({"status": status}, 503, {"retry-after": _RETRY_SECONDS})

"""REST API: agents, health and metrics."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
from fastapi import APIRouter
from osmosis.rollout.v1.rollout_service_pb2 import GetServerInfoRequest, ListAgentsRequest
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollout_gateway import openapi as shown
from rollout_gateway.calls import Rollouts
from rollout_gateway.http.request_boundary import HttpMetrics
from rollout_gateway.key_check import KeyCheck
from rollout_gateway.rest.proto_json import response_json
from rollout_gateway.rest.rollout_routes import NO_QUERY

_RETRY_SECONDS: Final = "1"
_EXPOSITION: Final[dict[str, Any]] = {
    "description": "Metrics in the Prometheus text format.",
    "content": {"text/plain": {"schema": {"type": "string"}}},
}


@dataclass(frozen=True, slots=True)
class ProcessMetrics:
    """The metrics of this process.

    Attributes:
        http: those of the gateway.
        server: returns those of a rollout server in this process, as Prometheus text; None if there is no such server.
        page: makes the page of all metrics of this process; None: they are the page.
    """

    http: HttpMetrics
    server: Callable[[], bytes] | None = None
    page: Callable[[bytes], Awaitable[bytes]] | None = None


def service_router(rollouts: Rollouts, keys: KeyCheck, metrics: ProcessMetrics) -> APIRouter:
    """Return the routes about the service."""
    router = APIRouter(tags=["service"], default_response_class=Response)
    _add_facts(router, rollouts, keys)
    _add_probes(router, rollouts)
    _add_metrics(router, rollouts, keys, metrics)
    return router


def _add_facts(router: APIRouter, rollouts: Rollouts, keys: KeyCheck) -> None:
    @router.get(
        "/v1/agents",
        responses={200: shown.json_response("ListAgentsResponseModel"), **shown.errors()},
        dependencies=[NO_QUERY],
    )
    async def list_agents(request: Request) -> Response:
        """List the agents of this server, with their tools and limits."""
        listed = await rollouts.calls(request).rpc.ListAgents(ListAgentsRequest())
        return Response(response_json(listed), media_type="application/json")

    @router.get(
        "/v1/server",
        responses={200: shown.json_response("GetServerInfoResponseModel"), **shown.errors()},
        dependencies=[NO_QUERY],
    )
    async def get_server_info(request: Request) -> Response:
        """Return the server's version, features, limits, load and counts."""
        calls = rollouts.calls(request)
        await keys.demand(calls)  # as for /metrics: the rpc itself requires none
        server = await calls.rpc.GetServerInfo(GetServerInfoRequest())
        return Response(response_json(server), media_type="application/json")


def _add_probes(router: APIRouter, rollouts: Rollouts) -> None:
    @router.get("/healthz", responses={200: shown.json_response("Alive")})
    async def healthz() -> Response:
        """Liveness: report that this process responds. Does not contact the rollout server and needs no API key."""
        return JSONResponse({"status": "ok"})

    not_ready = shown.json_response(
        "Unready", "No rollout can be started at the moment. Retry after Retry-After seconds."
    )

    @router.get("/readyz", responses={200: shown.json_response("Ready"), 503: not_ready})
    async def readyz(request: Request) -> Response:
        """Readiness: report whether rollouts can be started. Needs no API key."""
        try:
            server = await rollouts.calls(request).rpc.GetServerInfo(GetServerInfoRequest())
        except grpc.aio.AioRpcError:
            server = None
        if server is None or server.draining:
            status = "draining" if server else "unavailable"
            return JSONResponse({"status": status}, 503, {"retry-after": _RETRY_SECONDS})
        return JSONResponse({"status": "ready", "running": server.running, "queued": server.queued})


def _add_metrics(router: APIRouter, rollouts: Rollouts, keys: KeyCheck, metrics: ProcessMetrics) -> None:
    @router.get("/metrics", responses={200: _EXPOSITION, **shown.errors()})
    async def read_metrics(request: Request) -> Response:
        """Return metrics of the gateway and, if it runs in the same process, of the rollout server.

        Server metrics require an API key if the server has keys. A gateway that runs alone serves its own metrics openly.
        """
        if metrics.server is None:
            return Response(metrics.http.text(), media_type=CONTENT_TYPE_LATEST)
        await keys.demand(rollouts.calls(request))
        both = metrics.server().rstrip(b"\n") + b"\n" + metrics.http.text()
        page = both if metrics.page is None else await metrics.page(both)
        return Response(page, media_type=CONTENT_TYPE_LATEST)

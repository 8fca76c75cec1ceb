"""REST API: agents, health and metrics, and the two HTML pages `/` and `/docs`."""

import base64
import hashlib
import re
from collections.abc import Callable
from importlib import resources
from typing import Any, Final

import grpc
from fastapi import APIRouter, FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.staticfiles import StaticFiles
from osmosis.rollout.v1.rollout_service_pb2 import GetServerInfoRequest, ListAgentsRequest
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

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
_FILES: Final = "/docs/files"
# Relative to the page: links stay valid behind a proxy that serves the gateway under a path prefix.
_LOCAL: Final = _FILES.removeprefix("/")
_INLINE: Final = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def service_router(
    rollouts: Rollouts, keys: KeyCheck, meters: HttpMetrics, metrics: Callable[[], bytes] | None
) -> APIRouter:
    """Return the routes about the service.

    `metrics` returns the metrics of a rollout server in this process, as Prometheus text; None if there is no such server.
    """
    router = APIRouter(tags=["service"], default_response_class=Response)

    @router.get(
        "/v1/agents",
        responses={200: shown.json_response("ListAgentsResponseModel"), **shown.errors()},
        dependencies=[NO_QUERY],
    )
    async def list_agents(request: Request) -> Response:
        """List the agents of this server, with their tools and limits."""
        listed = await rollouts.calls(request).rpc.ListAgents(ListAgentsRequest())
        return Response(response_json(listed), media_type="application/json")

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

    @router.get("/metrics", responses={200: _EXPOSITION, **shown.errors()})
    async def read_metrics(request: Request) -> Response:
        """Return metrics of the gateway and, if it runs in the same process, of the rollout server.

        Server metrics require an API key if the server has keys. A gateway that runs alone serves its own metrics openly.
        """
        if metrics is None:
            return Response(meters.text(), media_type=CONTENT_TYPE_LATEST)
        await keys.demand(rollouts.calls(request))
        both = metrics().rstrip(b"\n") + b"\n" + meters.text()
        return Response(both, media_type=CONTENT_TYPE_LATEST)

    return router


def add_pages(app: FastAPI) -> None:
    """Add the start page at `/`, Swagger UI at `/docs`, and the files that Swagger UI loads.

    Both pages work without internet access and behind a path prefix. They show no state, so neither needs an API key.
    """
    start = resources.files("rollout_gateway").joinpath("index.html").read_text(encoding="utf-8")
    swagger = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=app.title,
        swagger_js_url=f"{_LOCAL}/swagger-ui-bundle.js",
        swagger_css_url=f"{_LOCAL}/swagger-ui.css",
        swagger_favicon_url=f"{_LOCAL}/favicon.png",
    )
    docs = bytes(swagger.body).decode()
    _add_page(app, "/", start, f"style-src {_hashes(start, 'style')}")
    loads = f"script-src 'self' {_hashes(docs, 'script')}; style-src 'self'; img-src 'self' data:; connect-src 'self'"
    _add_page(app, "/docs", docs, loads)
    app.mount(_FILES, StaticFiles(directory=str(resources.files("fastapi_offline") / "static")))


def _add_page(app: FastAPI, path: str, html: str, sources: str) -> None:
    """Add a static page. Its Content-Security-Policy allows only `sources`."""
    policy = f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

    async def page(_: Request) -> HTMLResponse:
        return HTMLResponse(html, headers={"content-security-policy": policy})

    app.add_route(path, page, include_in_schema=False)


def _hashes(html: str, tag: str) -> str:
    """CSP source expressions for the inline scripts (`tag` "script") or style sheets ("style") of a page."""
    digests = (hashlib.sha256(text.encode()).digest() for kind, text in _INLINE.findall(html) if kind == tag)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

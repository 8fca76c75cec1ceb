"""The plain API: what this service is, whether it is well, its metrics, and the page at /docs."""

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
    "description": "Metrics in Prometheus' text form.",
    "content": {"text/plain": {"schema": {"type": "string"}}},
}
_FILES: Final = "/docs/files"
# Relative to the page, so that they hold behind a proxy that serves the gateway under a prefix.
_LOCAL: Final = _FILES.removeprefix("/")
_SCRIPT: Final = re.compile("<script>(.*?)</script>", re.DOTALL)


def service_router(
    rollouts: Rollouts, keys: KeyCheck, meters: HttpMetrics, metrics: Callable[[], bytes] | None
) -> APIRouter:
    """The routes about the service; `metrics` gives the server's own, where it runs in this process."""
    router = APIRouter(tags=["service"], default_response_class=Response)

    @router.get(
        "/v1/agents",
        responses={200: shown.json_response("ListAgentsResponseModel"), **shown.errors()},
        dependencies=[NO_QUERY],
    )
    async def list_agents(request: Request) -> Response:
        """The agents of this server, with their tools and limits."""
        listed = await rollouts.calls(request).rpc.ListAgents(ListAgentsRequest())
        return Response(response_json(listed), media_type="application/json")

    @router.get("/healthz", responses={200: shown.json_response("Alive")})
    async def healthz() -> Response:
        """Whether this process answers. Asks nobody."""
        return JSONResponse({"status": "ok"})

    not_ready = shown.json_response("Unready", "No rollout can be started now; try again after Retry-After.")

    @router.get("/readyz", responses={200: shown.json_response("Ready"), 503: not_ready})
    async def readyz(request: Request) -> Response:
        """Whether rollouts can be started. Open also where a key is demanded elsewhere."""
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
        """Metrics of the server and of the gateway. Needs a key where the server does; a gateway's own are open."""
        if metrics is None:
            return Response(meters.text(), media_type=CONTENT_TYPE_LATEST)
        await keys.demand(rollouts.calls(request))
        both = metrics().rstrip(b"\n") + b"\n" + meters.text()
        return Response(both, media_type=CONTENT_TYPE_LATEST)

    return router


def add_docs(app: FastAPI) -> None:
    """Adds the page, Swagger UI, and the files that it loads, which are installed with this package: it needs no internet."""
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=app.title,
        swagger_js_url=f"{_LOCAL}/swagger-ui-bundle.js",
        swagger_css_url=f"{_LOCAL}/swagger-ui.css",
        swagger_favicon_url=f"{_LOCAL}/favicon.png",
    )
    html = bytes(page.body).decode()
    headers = {"content-security-policy": _policy(html)}

    async def docs(_: Request) -> HTMLResponse:
        return HTMLResponse(html, headers=headers)

    app.add_route("/docs", docs, include_in_schema=False)
    app.mount(_FILES, StaticFiles(directory=str(resources.files("fastapi_offline") / "static")))


def _policy(html: str) -> str:
    """Only this origin, and of scripts in the page only those that it has now."""
    digests = (hashlib.sha256(script.encode()).digest() for script in _SCRIPT.findall(html))
    scripts = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src 'self' {scripts}; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )

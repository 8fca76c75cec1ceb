"""The gateway as an ASGI application: HTTP/JSON in front, a gRPC channel behind, and nothing but translation between."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc
from fastapi import Depends, FastAPI
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from rollout_gateway.calls import Rollouts, honour_deadline
from rollout_gateway.errors import ErrorResponses
from rollout_gateway.fleet.fleet import stub_of
from rollout_gateway.http.request_body import RequestBodies
from rollout_gateway.http.request_boundary import HttpMetrics, RequestBoundary
from rollout_gateway.key_check import KeyCheck
from rollout_gateway.openapi import schemas
from rollout_gateway.osmosis_http.body import InitBody, RolloutBody
from rollout_gateway.osmosis_http.routes import asynchronous_router, synchronous_router
from rollout_gateway.rest.body import BODIES
from rollout_gateway.rest.errors import uses_plain_errors
from rollout_gateway.rest.event_routes import events_router
from rollout_gateway.rest.rollout_routes import rollouts_router
from rollout_gateway.rest.service_routes import add_pages, service_router
from rollout_gateway.settings import GatewaySettings

_DESCRIPTION: Final = """Runs agent rollouts for the training of language models.

`/v1/rollouts` is the plain API: start, watch, read and cancel rollouts. Its errors, and those of paths that do not exist,
have one shape, `PlainError`: a stable code, the fields at fault (422), what to do, and `Retry-After` where waiting helps.
The two dialects are those of trainers that exist; errors on their paths have FastAPI's shape. gRPC callers find more:
`osmosis.rollout.v1`.
"""
_SECURITY: Final = {
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "An API key, where the server has some: `Authorization: Bearer KEY`.",
    }
}

# Bodies of requests may take the memory of so many of the largest.
_BODIES_UNDER_WAY: Final = 8
_BODIES: Final = (RolloutBody, InitBody, *BODIES)


class GatewayApp(FastAPI):
    """FastAPI, with what it is not told of added to the OpenAPI description: raw bodies, errors, and API keys."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI description; made once."""
        if self.openapi_schema is None:
            told: list[tuple[type[BaseModel], JsonSchemaMode]] = [(model, "validation") for model in _BODIES]
            _, models = models_json_schema(told, ref_template="#/components/schemas/{model}")
            described = super().openapi()
            components = described.setdefault("components", {})
            components.setdefault("schemas", {}).update({**models["$defs"], **schemas()})
            components["securitySchemes"] = _SECURITY
            # Without keys on the server none is needed.
            described["security"] = [{"bearer": []}, {}]
        return super().openapi()


def create_app(
    servers: grpc.aio.Channel | Sequence[grpc.aio.Channel],
    settings: GatewaySettings | None = None,
    *,
    metrics: Callable[[], bytes] | None = None,
) -> FastAPI:
    """Makes the application for one server or several.

    Channels stay the caller's, who closes them after the last request; those to several servers are `open_channel`'s.
    `metrics` gives the metrics of a server in this process in Prometheus' text form, for `GET /metrics`; it is called on the
    event loop. Raises ValueError for channels that are no fleet.
    """
    settings = settings or GatewaySettings()
    channels = [servers] if isinstance(servers, grpc.aio.Channel) else servers
    rollouts, meters = Rollouts(stub_of(channels), settings), HttpMetrics()
    keys = KeyCheck(rollouts.server, settings.call_seconds)
    intake = RequestBodies(keys, _BODIES_UNDER_WAY * settings.max_body_bytes)
    dialects = [synchronous_router(rollouts, intake), asynchronous_router(rollouts, keys, intake)]
    plain = [
        rollouts_router(rollouts, intake),
        events_router(rollouts),
        service_router(rollouts, keys, meters, metrics),
    ]
    app = GatewayApp(
        title="Rollout gateway",
        version="1",
        description=_DESCRIPTION,
        dependencies=[Depends(honour_deadline)],
        # FastAPI's own pages load their scripts from a CDN.
        docs_url=None,
        redoc_url=None,
    )
    for router in (*plain, *dialects):
        app.include_router(router)
    add_pages(app)
    is_plain = uses_plain_errors(route for router in dialects for route in router.routes)
    ErrorResponses(rollouts, keys, is_plain).install(app)
    app.add_middleware(RequestBoundary, is_plain=is_plain, meters=meters, limits=settings)
    return app

"""The gateway as an ASGI application: it translates HTTP/JSON requests to gRPC calls and does nothing else."""

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import grpc
from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.routing import Route

from rollout_gateway.calls import Rollouts
from rollout_gateway.errors import ErrorResponses
from rollout_gateway.fleet.fleet import Fleet, stub_of
from rollout_gateway.http.request_body import RequestBodies
from rollout_gateway.http.request_boundary import HttpMetrics, RequestBoundary
from rollout_gateway.key_check import KeyCheck
from rollout_gateway.model_api.routes import model_router
from rollout_gateway.openapi import schemas
from rollout_gateway.osmosis_http.body import InitBody, RolloutBody
from rollout_gateway.osmosis_http.routes import asynchronous_router, synchronous_router
from rollout_gateway.page.routes import add_pages
from rollout_gateway.rest.body import BODIES
from rollout_gateway.rest.errors import uses_plain_errors
from rollout_gateway.rest.event_routes import events_router
from rollout_gateway.rest.group_routes import groups_router
from rollout_gateway.rest.rollout_routes import rollouts_router
from rollout_gateway.rest.service_routes import ProcessMetrics, service_router
from rollout_gateway.settings import GatewaySettings

_DESCRIPTION: Final = """Runs rollouts of multi-turn, tool-using agents for RL training of LLMs.

* REST API, `/v1/rollouts` and `/v1/groups`: start, list, follow and cancel rollouts, and read their token samples.
* Synchronous HTTP API, `POST /rollout`: run one rollout and wait for its result.
* Asynchronous HTTP API, `POST /v1/rollout/init`: start one rollout; the server posts the result to the trainer.
* Model endpoint of a rollout, `/r/{uid}/v1`: an agent that owns its loop calls the rollout's model here, with an OpenAI client
  or, at the base `/r/{uid}`, with an Anthropic client. Below `/r/{uid}/v1/aux` the same calls are beside the task.

All of them, and the gRPC API (`osmosis.rollout.v1`, which offers more), share one set of rollouts.

Errors of the REST API and of unknown paths have the shape `PlainError`: a stable code, a message that says what to do, and
the invalid fields (422). `Retry-After` is present if a retry can help. The synchronous and asynchronous HTTP API use FastAPI's
error shape, and model endpoints that of OpenAI or Anthropic.
"""
_SECURITY: Final = {
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "An API key, required if the server has keys: `Authorization: Bearer KEY`. Model endpoints require the key "
        "of the rollout instead.",
    },
    "model_key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The key of a rollout."},
}

# Memory budget for request bodies in flight, in bodies of the maximum size.
_BODIES_UNDER_WAY: Final = 8
_MODEL_BODIES_UNDER_WAY: Final = 4
_BODIES: Final = (RolloutBody, InitBody, *BODIES)


class GatewayApp(FastAPI):
    """FastAPI application that adds raw bodies, errors and API keys to the OpenAPI description."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI description. It is built once."""
        if self.openapi_schema is None:
            bodies: list[tuple[type[BaseModel], JsonSchemaMode]] = [(model, "validation") for model in _BODIES]
            _, models = models_json_schema(bodies, ref_template="#/components/schemas/{model}")
            described = super().openapi()
            paths, is_plain = described["paths"], self.state.is_plain
            order = sorted(paths, key=lambda path: (not is_plain({"path": path}), path.startswith("/r/")))
            described["paths"] = {path: paths[path] for path in order}  # the REST API first
            components = described.setdefault("components", {})
            components.setdefault("schemas", {}).update({**models["$defs"], **schemas()})
            components["securitySchemes"] = _SECURITY
            # The empty alternative: a server without keys requires none.
            described["security"] = [{"bearer": []}, {}]
        return super().openapi()


def create_app(
    servers: grpc.aio.Channel | Sequence[grpc.aio.Channel] | Fleet,
    settings: GatewaySettings | None = None,
    *,
    metrics: Callable[[], bytes] | None = None,
    page: Callable[[bytes], Awaitable[bytes]] | None = None,
) -> FastAPI:
    """Create the application for one rollout server or several.

    Args:
        servers: the caller closes these channels after the last request. Several channels must come from `open_channel`.
        settings: the defaults if None.
        metrics: returns the metrics of a rollout server in this process, as Prometheus text; called on the event loop.
        page: makes the page of `GET /metrics` of all metrics of this process. By default these are the page.

    Raises:
        ValueError: several channels that `open_channel` did not make, or two channels to one address.
    """
    settings = settings or GatewaySettings()
    rollouts, meters = Rollouts(stub_of(servers), settings), HttpMetrics()
    keys = KeyCheck(rollouts.server, settings.call_seconds)
    intake = RequestBodies(keys, _BODIES_UNDER_WAY * settings.max_body_bytes)
    model_intake = RequestBodies(keys, _MODEL_BODIES_UNDER_WAY * settings.max_model_body_bytes)
    osmosis = [synchronous_router(rollouts, intake), asynchronous_router(rollouts, keys, intake)]
    rest = [rollouts_router(rollouts, intake), events_router(rollouts), groups_router(rollouts, intake)]
    service = service_router(rollouts, keys, ProcessMetrics(meters, metrics, page))
    app = GatewayApp(
        title="Rollout gateway",
        version="1",
        description=_DESCRIPTION,
        # FastAPI's own pages load their scripts from a CDN; `add_pages` serves them from this process.
        docs_url=None,
        redoc_url=None,
    )
    is_plain = app.state.is_plain = uses_plain_errors(route for router in osmosis for route in router.routes)
    # FastAPI would search an included router twice for each request. Routes are tried in turn, so those of rollouts come first.
    for router in (*osmosis, model_router(rollouts, model_intake), *rest, service):
        app.router.routes += router.routes
    add_pages(app)
    # Starlette's patterns end with `$`, which also matches before a line break: `/rollout%0a` would be `/rollout`.
    for route in (each for each in app.routes if isinstance(each, Route)):
        route.path_regex = re.compile(rf"{route.path_regex.pattern.removesuffix('$')}\Z")
    ErrorResponses(rollouts, keys, is_plain).install(app)
    app.state.meters = meters
    app.add_middleware(RequestBoundary, is_plain=is_plain, meters=meters, limits=settings)
    return app

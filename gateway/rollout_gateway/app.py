"""The gateway as an ASGI application: HTTP/JSON in front, a gRPC channel behind, and nothing but translation between."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

import grpc
from fastapi import FastAPI
from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from rollout_gateway.body import InvalidBody, RolloutBody
from rollout_gateway.boundary import Boundary
from rollout_gateway.calls import HungUp, Rollouts, StreamEndedEarly
from rollout_gateway.limits import BodyLimit
from rollout_gateway.routes.synchronous import synchronous_router
from rollout_gateway.settings import GatewaySettings
from rollout_gateway.status import Problem, answer_failed_call

_LOG = logging.getLogger(__name__)
_DESCRIPTION = "Runs agent rollouts for the training of language models. gRPC callers find more: `osmosis.rollout.v1`."


class GatewayApp(FastAPI):
    """FastAPI, with the models of bodies that handlers read raw added to the OpenAPI description."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI description; made once."""
        if self.openapi_schema is None:
            _, models = models_json_schema([(RolloutBody, "validation")], ref_template="#/components/schemas/{model}")
            described = super().openapi()
            described["components"]["schemas"].update(models["$defs"])
        return super().openapi()


def create_app(channel: grpc.aio.Channel, settings: GatewaySettings | None = None) -> FastAPI:
    """Makes the application. The channel stays the caller's, who closes it after the last request."""
    settings = settings or GatewaySettings()
    app = GatewayApp(title="Rollout gateway", version="1", description=_DESCRIPTION)
    app.include_router(synchronous_router(Rollouts(RolloutServiceStub(channel), settings)))
    _answer(app, InvalidBody, _invalid_body)
    _answer(app, grpc.aio.AioRpcError, _failed_call)
    _answer(app, StreamEndedEarly, _ended_early)
    _answer(app, HungUp, _hung_up)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(Boundary)
    return app


def _answer(app: FastAPI, kind: type[Exception], handler: Callable[[Request, Any], Awaitable[Response]]) -> None:
    app.add_exception_handler(kind, cast(Callable[[Request, Exception], Awaitable[Response]], handler))


async def _invalid_body(_: Request, error: InvalidBody) -> Response:
    return Problem(422, error.violations).response()


async def _failed_call(request: Request, error: grpc.aio.AioRpcError) -> Response:
    return answer_failed_call(error, request.state.request_id)


async def _ended_early(request: Request, error: StreamEndedEarly) -> Response:
    _LOG.error("request %s: the stream of rollout %s ended without an outcome", request.state.request_id, error)
    return Problem(503, "The rollout server ended the call before the rollout had an outcome").response()


async def _hung_up(_: Request, __: HungUp) -> Response:
    # Nobody is there to read it; the access log shows what happened.
    return Response(status_code=499)

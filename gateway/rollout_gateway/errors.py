"""What becomes of a request that fails: the one place that knows which API it was for, and so the shape of its error."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import grpc
from fastapi import FastAPI
from fastapi.exception_handlers import request_validation_exception_handler
from fastapi.exceptions import RequestValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from rollout_gateway.calls import ClientDisconnected, StreamEndedEarly, call_metadata
from rollout_gateway.http.request_body import Overloaded
from rollout_gateway.json_body import InvalidBody, first_of
from rollout_gateway.key_check import STRANGER, KeyCheck
from rollout_gateway.rest.errors import INVALID, plain_response
from rollout_gateway.rest.request import BODY_FIELDS, QUERY_FIELDS
from rollout_gateway.status import Problem, logged_problem

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ErrorResponses:
    """Exception handlers. Requests for which `is_plain` are answered in the plain API's shape, the others in FastAPI's."""

    keys: KeyCheck
    is_plain: Callable[[Scope], bool]

    def install(self, app: FastAPI) -> None:
        """Has the application ask these handlers."""
        handlers: dict[type[Exception], Callable[[Request, Any], Awaitable[Response]]] = {
            InvalidBody: self.invalid_body,
            RequestValidationError: self.invalid_parameters,
            grpc.aio.AioRpcError: self.failed_call,
            StreamEndedEarly: self.ended_early,
            ClientDisconnected: self.hung_up,
            ClientDisconnect: self.hung_up,
            Overloaded: self.overloaded,
        }
        for kind, handler in handlers.items():
            app.add_exception_handler(kind, cast(Callable[[Request, Exception], Awaitable[Response]], handler))

    async def invalid_body(self, request: Request, error: InvalidBody) -> Response:
        """422, for those who may know; a stranger hears about the key."""
        return await self._unless_stranger(request, Problem(422, error.violations, code=INVALID))

    async def invalid_parameters(self, request: Request, error: RequestValidationError) -> Response:
        """The same for what is wrong with a query or a path."""
        if not self.is_plain(request.scope):
            return await request_validation_exception_handler(request, error)
        return await self._unless_stranger(request, Problem(422, first_of(error.errors()), code=INVALID))

    async def failed_call(self, request: Request, error: grpc.aio.AioRpcError) -> Response:
        """What the server answered, in HTTP's terms and the body's or query's names."""
        plain = self.is_plain(request.scope)
        fields = (QUERY_FIELDS if request.method == "GET" else BODY_FIELDS) if plain else None
        return self._answer(request, logged_problem(error, request.state.request_id, fields))

    async def ended_early(self, request: Request, error: StreamEndedEarly) -> Response:
        """The server broke the contract."""
        _LOG.error("request %s: the stream of rollout %s ended without an outcome", request.state.request_id, error)
        text = "The rollout server ended the call before the rollout had an outcome"
        return self._answer(request, Problem(503, text, code=grpc.StatusCode.UNAVAILABLE.name))

    async def hung_up(self, _: Request, __: ClientDisconnected) -> Response:
        """Nobody is there to read it; the access log shows what happened."""
        return Response(status_code=499)

    async def overloaded(self, request: Request, _: Overloaded) -> Response:
        """503: the client comes back when other bodies have been parsed."""
        text = "The bodies of other requests take all the memory there is for them: send it again after Retry-After"
        return self._answer(request, Problem(503, text, {"retry-after": "1"}, "OVERLOADED", 1.0))

    async def _unless_stranger(self, request: Request, problem: Problem) -> Response:
        """Where the server cannot be asked, what is wrong with the request says more than that."""
        try:
            if not getattr(request.state, "key_accepted", False):
                await self.keys.demand(call_metadata(request))
        except grpc.aio.AioRpcError as error:
            if error.code() in STRANGER:
                return await self.failed_call(request, error)
        return self._answer(request, problem)

    def _answer(self, request: Request, problem: Problem) -> Response:
        if self.is_plain(request.scope):
            return plain_response(problem, request.state.request_id)
        return problem.response()

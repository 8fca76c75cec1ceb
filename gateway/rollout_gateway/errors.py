"""What becomes of a request that fails: the one place that knows which API it was for, and so the shape of its error."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from fastapi import FastAPI
from fastapi.exception_handlers import http_exception_handler, request_validation_exception_handler
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from rollout_gateway.calls import ClientDisconnected, Rollouts, StreamEndedEarly
from rollout_gateway.http.request_body import Overloaded
from rollout_gateway.json_body import InvalidBody, first_of
from rollout_gateway.key_check import STRANGER, KeyCheck
from rollout_gateway.rest.errors import INVALID, http_problem, plain_response
from rollout_gateway.rest.request import BODY_FIELDS, QUERY_FIELDS
from rollout_gateway.status import Problem, logged_problem

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ErrorResponses:
    """Exception handlers. Requests for which `is_plain` are answered in the plain API's shape, the others in FastAPI's."""

    rollouts: Rollouts
    keys: KeyCheck
    is_plain: Callable[[Scope], bool]

    def install(self, app: FastAPI) -> None:
        """Has the application ask for its answers here."""
        kinds = (InvalidBody, RequestValidationError, HTTPException, grpc.aio.AioRpcError, StreamEndedEarly, Overloaded)
        for kind in (*kinds, ClientDisconnected, ClientDisconnect):
            app.add_exception_handler(kind, self.response)

    async def response(self, request: Request, error: Exception) -> Response:
        """The answer to a request that failed so."""
        plain = self.is_plain(request.scope)
        if isinstance(error, ClientDisconnected | ClientDisconnect):
            # Nobody is there to read it; the access log shows what happened.
            return Response(status_code=499)
        if isinstance(error, HTTPException) and not plain:
            return await http_exception_handler(request, error)
        if isinstance(error, RequestValidationError) and not plain:
            return await request_validation_exception_handler(request, error)
        if isinstance(error, InvalidBody | RequestValidationError):
            # 422, for those who may know; a stranger hears about the key.
            error = await self._refused_key(request) or error
        problem = self._problem(request, error, plain)
        return plain_response(problem, request.state.request_id) if plain else problem.response()

    def _problem(self, request: Request, error: Exception, plain: bool) -> Problem:
        match error:
            case grpc.aio.AioRpcError():
                fields = BODY_FIELDS if request.method != "GET" else QUERY_FIELDS
                # Routes of the dialects leave those of their bodies here.
                return logged_problem(
                    error, request.state.request_id, fields if plain else getattr(request.state, "fields", None)
                )
            case HTTPException():
                return http_problem(error.status_code, str(error.detail), error.headers)
            case InvalidBody():
                return Problem(422, error.violations, code=INVALID)
            case RequestValidationError():
                return Problem(422, first_of(error.errors()), code=INVALID)
            case Overloaded():
                text = "The bodies of other requests take all the memory there is for them: send it again after Retry-After"
                return Problem(503, text, {"retry-after": "1"}, "OVERLOADED", 1.0)
        _LOG.error("request %s: the stream of rollout %s ended without an outcome", request.state.request_id, error)
        text = "The rollout server ended the call before the rollout had an outcome"
        return Problem(503, text, code=grpc.StatusCode.UNAVAILABLE.name)

    async def _refused_key(self, request: Request) -> grpc.aio.AioRpcError | None:
        """Where the server cannot be asked, what is wrong with the request says more than that."""
        try:
            if not getattr(request.state, "key_accepted", False):
                await self.keys.demand(self.rollouts.calls(request))
        except grpc.aio.AioRpcError as error:
            return error if error.code() in STRANGER else None
        return None

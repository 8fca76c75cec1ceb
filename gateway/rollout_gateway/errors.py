"""Exception handlers. This is the only place that chooses the shape of an error by the API of the request."""

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
    """Exception handlers. Errors have the REST API's shape if `is_plain` returns true for the request, else FastAPI's."""

    rollouts: Rollouts
    keys: KeyCheck
    is_plain: Callable[[Scope], bool]

    def install(self, app: FastAPI) -> None:
        """Register the handlers with the application."""
        kinds = (InvalidBody, RequestValidationError, HTTPException, grpc.aio.AioRpcError, StreamEndedEarly, Overloaded)
        for kind in (*kinds, ClientDisconnected, ClientDisconnect):
            app.add_exception_handler(kind, self.response)

    async def response(self, request: Request, error: Exception) -> Response:
        """Return the response to a request that raised `error`."""
        plain = self.is_plain(request.scope)
        if isinstance(error, ClientDisconnected | ClientDisconnect):
            # The client is gone. The status only reaches the metrics.
            return Response(status_code=499)
        if isinstance(error, HTTPException) and not plain:
            return await http_exception_handler(request, error)
        if isinstance(error, RequestValidationError) and not plain:
            return await request_validation_exception_handler(request, error)
        if isinstance(error, InvalidBody | RequestValidationError):
            # A 422 describes the request's fields. A caller whose key is refused must not see it and gets the refusal.
            error = await self._refused_key(request) or error
        problem = self._problem(request, error, plain)
        return plain_response(problem, request.state.request_id) if plain else problem.response()

    def _problem(self, request: Request, error: Exception, plain: bool) -> Problem:
        match error:
            case grpc.aio.AioRpcError():
                fields = BODY_FIELDS if request.method != "GET" else QUERY_FIELDS
                # The routes of the two other HTTP APIs store the field map of their bodies here.
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
                text = "Other requests use all memory for request bodies; retry after Retry-After seconds"
                return Problem(503, text, {"retry-after": "1"}, "OVERLOADED", 1.0)
        _LOG.error("request %s: the stream of rollout %s ended without an outcome", request.state.request_id, error)
        text = "The rollout server ended the call before the rollout had an outcome"
        return Problem(503, text, code=grpc.StatusCode.UNAVAILABLE.name)

    async def _refused_key(self, request: Request) -> grpc.aio.AioRpcError | None:
        """Return the server's refusal of the key; None if it accepts the key or cannot be reached.

        If it cannot be reached, the fault in the request is the more useful error.
        """
        try:
            if not getattr(request.state, "key_accepted", False):
                await self.keys.demand(self.rollouts.calls(request))
        except (grpc.aio.AioRpcError, HTTPException) as error:  # HTTPException: its deadline is malformed, too
            return error if isinstance(error, grpc.aio.AioRpcError) and error.code() in STRANGER else None
        return None

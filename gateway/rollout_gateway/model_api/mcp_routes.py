"""The tools of a rollout as an MCP server at `/r/{uid}/mcp`: streamable HTTP without sessions, with responses in JSON.

Nothing is held between two requests, so any request may be the first one. A client that leaves cancels its call, unless it gave the
call an `Idempotency-Key`: then the call goes on, and the same request gets its result.

The `Origin` is not checked. That check protects servers that trust whoever reaches them; here each request needs the rollout's key.
"""

import math
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

import grpc
import msgspec
from fastapi import APIRouter
from fastapi.routing import APIRoute
from osmosis.rollout.v1 import agent_service_pb2 as pb
from starlette.requests import Request
from starlette.responses import Response

from rollout_gateway.calls import Calls, Rollouts, unless_hung_up
from rollout_gateway.http.request_body import RequestBodies
from rollout_gateway.model_api import mcp_messages as mcp
from rollout_gateway.model_api.delivery import agent_rpcs
from rollout_gateway.model_api.errors import FAULTS, OVER, ModelError, model_error
from rollout_gateway.model_api.fields import MAX_WORD, Object
from rollout_gateway.rest.rollout_routes import Uid

# Agents may know only the base URL for OpenAI's clients.
_PATHS: Final = ("/r/{uid}/mcp", "/r/{uid}/v1/mcp")
_REFUSED: Final = -32010
"""The server refuses the request for now, or because the rollout has ended; `data.reason` says why."""
_CODES: Final[Mapping[int, int]] = {
    400: mcp.INVALID_PARAMS,
    404: mcp.INVALID_PARAMS,
    403: mcp.INVALID_REQUEST,
    413: mcp.INVALID_REQUEST,
}
_PLACES: Final[Mapping[str, str]] = {"arguments_json": "params.arguments", "repeat_key": "Idempotency-Key"}


class _McpRoute(APIRoute):
    """A route whose errors are those of JSON-RPC. One that comes before the message is known also has a status of HTTP."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler, which raises no fault of the request or of the server."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await handle(request)
            except mcp.McpError as error:
                return _json(mcp.error_response(error), 400)
            except FAULTS as fault:
                found = model_error(fault, request.state.request_id)
                return _json(mcp.error_response(_mcp_error(found)), found.status, found.headers)

        return handler


def add_mcp(router: APIRouter, rollouts: Rollouts, intake: RequestBodies) -> None:
    """Add the routes of the MCP servers of all rollouts."""

    async def serve_mcp(request: Request, uid: Uid) -> Response:
        """Respond to one message."""
        calls, version = rollouts.calls(request, uid=uid), request.headers.get(mcp.VERSION_HEADER)
        modern = version is not None and version not in mcp.HANDSHAKE_VERSIONS
        message = await intake.read(request, calls, lambda content: mcp.read_message(content, modern=modern))
        if message.id is None:
            return Response(status_code=202)
        try:
            if modern:
                mcp.check_modern(message, {name: request.headers.getlist(name) for name in request.headers})
            return _json(await _result(request, calls, message))
        except mcp.McpError as error:
            return _failed(message, error)
        except grpc.aio.AioRpcError as fault:
            refused = model_error(fault, request.state.request_id)
            return _failed(message, _mcp_error(refused), refused.headers)

    options: dict[str, Any] = {"response_class": Response, "include_in_schema": False}
    for path in _PATHS:
        router.add_api_route(path, serve_mcp, methods=["POST"], name="mcp", route_class_override=_McpRoute, **options)


async def _result(request: Request, calls: Calls, message: mcp.McpMessage) -> Object:
    """Return the response to a request. Raises McpError and AioRpcError."""
    rpcs = agent_rpcs(calls)
    match message.method:
        case "initialize" if not message.modern:
            return mcp.initialized(message)
        case "ping" if not message.modern:
            return message.response({})
        case "server/discover" if message.modern:
            return mcp.discovered(message)
        case "tools/list":
            listing = rpcs.ListRolloutTools(pb.ListRolloutToolsRequest(uid=calls.uid), timeout=None)
            return mcp.listed(message, await unless_hung_up(request, listing))
        case "tools/call":
            repeat_key = request.headers.get("idempotency-key", "")
            if len(repeat_key) > MAX_WORD:
                raise mcp.McpError(mcp.INVALID_REQUEST, f"Idempotency-Key: at most {MAX_WORD} characters")
            calling = rpcs.CallRolloutTool(mcp.tool_request(message, calls.uid, repeat_key), timeout=None)
            return mcp.called(message, await unless_hung_up(request, calling))
        case unknown:
            raise mcp.McpError(mcp.METHOD_NOT_FOUND, f"there is no method {unknown[:MAX_WORD]!r} here")


def _mcp_error(error: ModelError) -> mcp.McpError:
    """Return an error of the server in the shape of JSON-RPC."""
    code = mcp.INTERNAL_ERROR if error.status in (500, 501) else _CODES.get(error.status, _REFUSED)
    data: dict[str, Any] = {"reason": error.reason}
    if error.reason != OVER and "retry-after" in error.headers:
        data["retryAfter"] = math.ceil(float(error.headers["retry-after"]))
    place = _PLACES.get(error.place, error.place)
    return mcp.McpError(code, error.message.replace(error.place, place, 1) if place else error.message, data)


def _failed(message: mcp.McpMessage, error: mcp.McpError, headers: Mapping[str, str] | None = None) -> Response:
    return _json(mcp.error_response(error, message.id), message.error_status(error), headers)


def _json(value: Object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, dict(headers or {}), "application/json")

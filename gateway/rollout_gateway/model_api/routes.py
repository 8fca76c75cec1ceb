"""Routes of the model endpoint of a rollout. Its base is `/r/{uid}`, with or without `/v1`."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec
from fastapi import APIRouter
from fastapi.routing import APIRoute
from osmosis.rollout.v1 import agent_service_pb2 as pb
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response

from rollout_gateway import openapi as shown
from rollout_gateway.calls import Calls, Rollouts, unless_hung_up
from rollout_gateway.http.request_body import RequestBodies
from rollout_gateway.json_body import read_body
from rollout_gateway.model_api.apis import CHAT, MESSAGES, RESPONSES, ModelShape
from rollout_gateway.model_api.call import ApiCall
from rollout_gateway.model_api.delivery import CompletionResponse, CompletionStream, Exchange, agent_rpcs
from rollout_gateway.model_api.errors import FAULTS, ModelError, model_error
from rollout_gateway.model_api.fields import MAX_WORD, InvalidCall, decode
from rollout_gateway.model_api.mcp_routes import add_mcp
from rollout_gateway.rest.body import FinishRollout
from rollout_gateway.rest.request import finish_request
from rollout_gateway.rest.rollout_routes import Uid

_JSON: Final = "application/json"
_BASE: Final = "/r/{uid}/v1"
_OTHER_BASES: Final = "/r/{uid}{base:model_base}"
# Clients' own ids of the agent that calls, such as a sub-agent.
_AGENT_IDS: Final = ("x-rollout-agent", "x-claude-code-agent-id", "x-session-id")
_ANY: Final = {"type": "object", "additionalProperties": True}
_SECURITY: Final[dict[str, Any]] = {"security": [{"bearer": []}, {"model_key": []}]}
_FAILURES: Final = (400, 403, 404, 408, 410, 413, 414, 429, 431, 500, 503, 504)


def _errors(shape: ModelShape) -> shown.Responses:
    return shown.dialect_errors(*_FAILURES, schema="AnthropicError" if shape is MESSAGES else "OpenAIError")


_MODELS: Final[dict[str, Any]] = {
    "responses": {200: {"description": "The model.", "content": {_JSON: {"schema": _ANY}}}, **_errors(CHAT)},
    "openapi_extra": _SECURITY,
}
_FINISH: Final[dict[str, Any]] = {
    "responses": {200: shown.json_response("FinishedModel"), **shown.errors(404, 409)},
    "openapi_extra": shown.raw_body(FinishRollout) | _SECURITY,
}


class _ModelRoute(APIRoute):
    """A route whose errors have the shape of an API."""

    shape = CHAT

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler, which raises no fault of the request or of the server."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await handle(request)
            except FAULTS as fault:
                places = getattr(request.state, "places", ())
                error = model_error(fault, request.state.request_id, places, self.shape.paths)
            content = msgspec.json.encode(self.shape.error(error))
            return Response(content, self.shape.status(error), dict(error.headers), _JSON)

        return handler


class _ResponsesRoute(_ModelRoute):
    shape = RESPONSES


class _MessagesRoute(_ModelRoute):
    shape = MESSAGES


class _ModelBase(StringConvertor):
    # OpenAI clients have a base with "/v1", Anthropic clients add it to any. Calls below "/aux" are beside the task.
    regex = "(?:/v1/v1|/aux|/v1/aux|/aux/v1)?"


register_url_convertor("model_base", _ModelBase())


def model_router(rollouts: Rollouts, intake: RequestBodies) -> APIRouter:
    """Return the routes of the model endpoints of all rollouts."""
    router = APIRouter()
    for base in (_BASE, _OTHER_BASES):
        options: dict[str, Any] = {"prefix": base, "include_in_schema": base == _BASE, "tags": ["model endpoint"]}
        options["default_response_class"] = Response
        for shape, route in ((CHAT, _ModelRoute), (RESPONSES, _ResponsesRoute), (MESSAGES, _MessagesRoute)):
            part = APIRouter(route_class=route, **options)
            _add_completions(part, shape, rollouts, intake)
            if shape is MESSAGES:
                _add_count(part, rollouts, intake)
            if shape is CHAT:
                _add_models(part, rollouts)
            router.routes += part.routes
        part = APIRouter(**options)
        _add_finish(part, rollouts, intake)
        router.routes += part.routes
    add_mcp(router, rollouts, intake)
    return router


def _add_completions(router: APIRouter, shape: ModelShape, rollouts: Rollouts, intake: RequestBodies) -> None:
    async def complete(request: Request, uid: Uid) -> Response:
        calls = rollouts.calls(request, uid=uid)
        call = await _read(request, calls, shape, intake)
        message = _with_headers(call.request, request)
        exchange = Exchange(shape, call, calls, request.state.request_id, rollouts.confirmations)
        if call.stream:
            return await _stream(request, exchange, message, rollouts.settings.heartbeat_seconds)
        return CompletionResponse(exchange, await unless_hung_up(request, exchange.completion(message)))

    router.add_api_route(f"/{shape.path}", complete, methods=["POST"], name=shape.path, **_described(shape))


def _add_count(router: APIRouter, rollouts: Rollouts, intake: RequestBodies) -> None:
    @router.post("/messages/count_tokens", **_described(MESSAGES, stream=False))
    async def count_tokens(request: Request, uid: Uid) -> Response:
        """Count the tokens of a prompt with the rollout's tokenizer."""
        calls = rollouts.calls(request, uid=uid)
        prompt = (await _read(request, calls, MESSAGES, intake)).request.prompt
        counted = await agent_rpcs(calls).CountTokens(pb.CountTokensRequest(uid=uid, prompt=prompt))
        return _json({"input_tokens": counted.tokens})


def _add_models(router: APIRouter, rollouts: Rollouts) -> None:
    @router.get("/models", **_MODELS)
    async def list_models(request: Request, uid: Uid) -> Response:
        """Return the model of the rollout, in a shape that OpenAI and Anthropic clients read."""
        access = await agent_rpcs(rollouts.calls(request, uid=uid)).GetModelAccess(pb.GetModelAccessRequest(uid=uid))
        name = access.model
        return _json({"object": "list", "data": [_model(name)], "has_more": False, "first_id": name, "last_id": name})

    @router.get("/models/{model:path}", **_MODELS)
    async def get_model(request: Request, uid: Uid, model: str) -> Response:
        """Return the model of the rollout under any name: calls may name it as they like."""
        await agent_rpcs(rollouts.calls(request, uid=uid)).GetModelAccess(pb.GetModelAccessRequest(uid=uid))
        return _json(_model(model))

    @router.get("/responses", include_in_schema=False)
    async def open_websocket(uid: Uid) -> Response:
        return _json(ModelError(426, "WebSocket is not supported: send POST", "UPGRADE_REQUIRED").openai(), 426)


def _add_finish(router: APIRouter, rollouts: Rollouts, intake: RequestBodies) -> None:
    # Its errors have the REST API's shape.
    @router.post("/finish", **_FINISH)
    async def finish_rollout(request: Request, uid: Uid) -> Response:
        """End the work of an agent that runs elsewhere: the rollout is rewarded and ends. Retries with the same body are safe."""
        calls = rollouts.calls(request, uid=uid)
        message = await intake.read(request, calls, lambda body: finish_request(uid, read_body(body, FinishRollout)))
        finished = await agent_rpcs(calls).FinishRollout(message, timeout=None)
        return _json({"repeated": finished.repeated})


def _model(name: str) -> dict[str, Any]:
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "rollout"}
    return openai | {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=_JSON)


async def _read(request: Request, calls: Calls, shape: ModelShape, intake: RequestBodies) -> ApiCall:
    call = await intake.read(request, calls, lambda content: shape.parse(decode(content)))
    call.request.uid = calls.uid
    # For the error response, if the server finds a message invalid.
    request.state.places = call.places
    return call


def _with_headers(message: pb.CallModelRequest, request: Request) -> pb.CallModelRequest:
    """Add what the headers and the base say about a call."""
    headers = request.headers
    repeat_key = headers.get("idempotency-key", "")
    if len(repeat_key) > MAX_WORD:
        raise InvalidCall("Idempotency-Key", f"at most {MAX_WORD} characters")
    message.repeat_key = repeat_key
    message.repeated = headers.get("x-stainless-retry-count", "0") not in ("", "0")
    message.auxiliary = "aux" in request.path_params.get("base", "") or headers.get("x-rollout-auxiliary", "") == "1"
    message.client_agent = next(filter(None, map(headers.get, _AGENT_IDS)), "")[:MAX_WORD]
    return message


async def _stream(
    request: Request, exchange: Exchange, message: pb.CallModelRequest, heartbeat_seconds: float
) -> Response:
    """Return a stream once there is a completion, or after a while without one: until then, an error has a status."""
    completing: asyncio.Task[pb.ModelCompletion] = asyncio.create_task(exchange.completion(message))
    try:
        await unless_hung_up(request, asyncio.wait((completing,), timeout=heartbeat_seconds))
        if completing.done():
            completing.result()
    except BaseException:
        completing.cancel()
        await asyncio.gather(completing, return_exceptions=True)
        raise
    return CompletionStream(exchange, completing, heartbeat_seconds)


def _described(shape: ModelShape, *, stream: bool = True) -> dict[str, Any]:
    """Return the description of a route whose handler reads the raw body."""
    kinds = {_JSON: {"schema": _ANY}} | ({"text/event-stream": {"schema": shown.TEXT}} if stream else {})
    body = {"required": True, "content": {_JSON: {"schema": _ANY}}, "description": f"As in {shape.title}."}
    return {
        "responses": {200: {"description": f"As in {shape.title}.", "content": kinds}, **_errors(shape)},
        "openapi_extra": {"requestBody": body, **_SECURITY},
    }

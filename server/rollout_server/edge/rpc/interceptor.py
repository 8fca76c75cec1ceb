"""The outermost interceptor: request ids, and errors as rich statuses. The one place that ends a call with a status."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from rollout_server.core.error import RolloutError
from rollout_server.edge.rpc.status import internal, status_of

_log = logging.getLogger(__name__)
REQUEST_ID = "x-request-id"

# grpc's own types have neither handlers nor messages as parameters.
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Boundary(grpc.aio.ServerInterceptor):
    """Wraps every rpc that answers one request, with one response or a stream."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Wraps the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        method = handler_call_details.method
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                _wrap_stream(handler.unary_stream, method),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            _wrap_unary(handler.unary_unary, method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _wrap_unary(handler: Any, method: str) -> Any:
    async def unary(request: object, context: _Context) -> object:
        request_id = await _identify(context)
        try:
            return await handler(request, context)
        except (Exception, asyncio.CancelledError) as error:
            await _end(context, error, method, request_id)

    return unary


def _wrap_stream(handler: Any, method: str) -> Any:
    async def stream(request: object, context: _Context) -> AsyncIterator[object]:
        request_id = await _identify(context)
        try:
            async for response in handler(request, context):
                yield response
        except (Exception, asyncio.CancelledError) as error:
            await _end(context, error, method, request_id)

    return stream


async def _identify(context: _Context) -> str:
    """The caller's request id, or a new one; sent back either way."""
    given = dict(context.invocation_metadata() or ()).get(REQUEST_ID, "")
    request_id = given if isinstance(given, str) and 0 < len(given) <= 128 else secrets.token_hex(8)
    await context.send_initial_metadata(((REQUEST_ID, request_id),))
    return request_id


async def _end(context: _Context, error: BaseException, method: str, request_id: str) -> NoReturn:
    if isinstance(error, asyncio.CancelledError):
        # Raised by the handler itself it would leave the caller hanging; otherwise the call is over.
        if context.cancelled() or (task := asyncio.current_task()) is None or task.cancelling():
            raise error
        _log.warning("%s was cancelled from within", method, extra={"request_id": request_id})
        await context.abort(grpc.StatusCode.ABORTED, "cancelled on the server")
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, RolloutError):
        await _abort(context, status_of(error, request_id))
    _log.error("%s failed", method, exc_info=error, extra={"request_id": request_id})
    await _abort(context, internal(request_id))


async def _abort(context: _Context, status: Status) -> NoReturn:
    rich = rpc_status.to_status(status)
    await context.abort(rich.code, rich.details, rich.trailing_metadata)
    raise AssertionError("abort raises")

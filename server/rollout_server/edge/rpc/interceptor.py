"""The outermost interceptor: request ids, and errors as rich statuses. The one place that ends a call with a status."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from rollout_server.core.error import InvalidRequest, RolloutError, Unauthenticated, Violation
from rollout_server.edge.rpc.caller import Admit, admit
from rollout_server.edge.rpc.open_calls import OpenCall, OpenCalls
from rollout_server.edge.rpc.status import internal, status_of
from rollout_server.edge.wrong_keys import WrongKeys

_log = logging.getLogger(__name__)
REQUEST_ID = "x-request-id"

# grpc's own types have neither handlers nor messages as parameters.
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Boundary(grpc.aio.ServerInterceptor):
    """Wraps every rpc that answers one request, with one response or a stream, and those that take and give streams."""

    def __init__(self, admit: Admit) -> None:
        self._admission = _Admission(admit, WrongKeys(), OpenCalls())

    def end_revoked(self) -> None:
        """Ends the calls whose keys are not accepted any more."""
        self._admission.calls.end_revoked()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Wraps the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None or (handler.request_streaming and not handler.response_streaming):
            return handler
        wrapped = _Wrapped(handler, handler_call_details.method, self._admission)
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(
                wrapped.streams, request_deserializer=None, response_serializer=handler.response_serializer
            )
        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        # The request is parsed inside the boundary: gRPC would tell of what is no message in Python's words.
        return make(
            wrapped.stream if handler.response_streaming else wrapped.unary,
            request_deserializer=None,
            response_serializer=handler.response_serializer,
        )


@dataclass(frozen=True)
class _Admission:
    """Who may call, what becomes of wrong keys, and the calls that were let in."""

    admit: Admit
    wrong_keys: WrongKeys
    calls: OpenCalls

    @asynccontextmanager
    async def entered(self, method: str, context: _Context) -> AsyncIterator[OpenCall]:
        """A call that has been let in. Raises `Unauthenticated`, after a while where there were many wrong keys."""
        metadata = dict(context.invocation_metadata() or ())
        try:
            admit(self.admit, method, metadata)
        except Unauthenticated:
            header = metadata.get("authorization")
            await asyncio.sleep(self.wrong_keys.note(header if isinstance(header, str) else None, context.peer()))
            raise
        with self.calls.entered(lambda: admit(self.admit, method, metadata)) as call:
            yield call


class _Wrapped:
    """The handler of one rpc."""

    def __init__(self, handler: _Handler, method: str, admission: _Admission) -> None:
        self._parse: Any = handler.request_deserializer
        self._unary: Any = handler.unary_unary
        self._stream: Any = handler.unary_stream or handler.stream_stream
        self._method = method
        self._admission = admission

    async def unary(self, payload: bytes, context: _Context) -> object:
        """Answers one request with one response."""
        request_id = _identify(context)
        context.set_trailing_metadata(((REQUEST_ID, request_id),))
        try:
            async with self._admission.entered(self._method, context) as call:
                return await call.wait(self._unary(self._parsed(payload), context))
        except (Exception, asyncio.CancelledError) as error:
            await _end(context, error, self._method, request_id)

    async def stream(self, payload: bytes, context: _Context) -> AsyncIterator[object]:
        """Answers one request with a stream."""
        async with aclosing(self._streamed(lambda: self._parsed(payload), context)) as responses:
            async for response in responses:
                yield response

    async def streams(self, payloads: AsyncIterator[bytes], context: _Context) -> AsyncIterator[object]:
        """Answers a stream with a stream."""
        async with aclosing(self._streamed(lambda: self._each_parsed(payloads), context)) as responses:
            async for response in responses:
                yield response

    async def _streamed(self, given: Callable[[], object], context: _Context) -> AsyncGenerator[object, None]:
        request_id = _identify(context)
        await context.send_initial_metadata(((REQUEST_ID, request_id),))
        try:
            async with self._admission.entered(self._method, context) as call:
                responses = self._stream(given(), context)
                if isinstance(responses, Awaitable):  # a handler that writes to the context
                    await call.wait(responses)
                    return
                async with aclosing(responses):
                    while (response := await call.wait(anext(responses, None))) is not None:
                        yield response
        except (Exception, asyncio.CancelledError) as error:
            await _end(context, error, self._method, request_id)

    async def _each_parsed(self, payloads: AsyncIterator[bytes]) -> AsyncIterator[object]:
        async for payload in payloads:
            yield self._parsed(payload)

    def _parsed(self, payload: bytes) -> object:
        try:
            return self._parse(payload)
        except DecodeError:
            raise InvalidRequest(Violation("request", "is not a message of the type that this rpc takes")) from None


def _identify(context: _Context) -> str:
    """The caller's request id, or a new one.

    It goes back ahead of the first item of a stream, and otherwise in the trailing metadata, where it costs no extra operation.
    """
    given = dict(context.invocation_metadata() or ()).get(REQUEST_ID, "")
    return given if isinstance(given, str) and 0 < len(given) <= 128 else secrets.token_hex(8)


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
        await _abort(context, status_of(error, request_id), request_id)
    _log.error("%s failed", method, exc_info=error, extra={"request_id": request_id})
    await _abort(context, internal(request_id), request_id)


async def _abort(context: _Context, status: Status, request_id: str) -> NoReturn:
    rich = rpc_status.to_status(status)
    await context.abort(rich.code, rich.details, (*rich.trailing_metadata, (REQUEST_ID, request_id)))
    raise AssertionError("abort raises")

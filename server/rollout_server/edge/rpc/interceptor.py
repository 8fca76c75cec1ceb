"""The outermost interceptor: authentication, request ids, and errors as rich statuses. Only it ends calls with a status."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing
from functools import partial
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from rollout_server.core.error import Forbidden, InvalidRequest, RolloutError, Unauthenticated, Violation
from rollout_server.edge.api_keys import WrongKeys
from rollout_server.edge.rpc.caller import Admit, AdmitModel, admit
from rollout_server.edge.rpc.field_count import MAX_FIELDS, TooManyFields, check_fields
from rollout_server.edge.rpc.open_calls import OpenCall, OpenCalls
from rollout_server.edge.rpc.status import internal, status_of

_log = logging.getLogger(__name__)
REQUEST_ID = "x-request-id"

# grpc's own types have neither handlers nor messages as parameters.
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class RequestInterceptor(grpc.aio.ServerInterceptor):
    """Wraps all rpcs but client-streaming ones, which the contract does not have."""

    def __init__(self, admit: Admit, admit_model: AdmitModel) -> None:
        self._admit = admit
        self._admit_model = admit_model
        self._wrong_keys = WrongKeys()
        self.open_calls = OpenCalls()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Return the wrapped handler of one call."""
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or (handler.request_streaming and not handler.response_streaming):
            return handler
        metadata = tuple(handler_call_details.invocation_metadata or ())
        changes = self.open_calls.changes

        def check() -> None:
            admit(self._admit, self._admit_model, method, metadata)

        try:
            check()
        except (Exception, asyncio.CancelledError) as error:
            # gRPC calls a stream-stream handler before it receives a message. So a refused call's request is never read.
            refused = _RejectedCall(error, method, handler.response_streaming, self._wrong_keys)
            return grpc.stream_stream_rpc_method_handler(refused.refuse)
        wrapped = _WrappedHandler(handler, method, partial(self.open_calls.entered, check, changes))
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(
                wrapped.streams, request_deserializer=None, response_serializer=handler.response_serializer
            )
        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        # Parse the request in the wrapper: gRPC would return Python's exception text to the caller.
        return make(
            wrapped.stream if handler.response_streaming else wrapped.unary,
            request_deserializer=None,
            response_serializer=handler.response_serializer,
        )


class _RejectedCall:
    """Ends a call that failed authentication."""

    def __init__(self, error: BaseException, method: str, streams: bool, wrong_keys: WrongKeys) -> None:
        self._error = error
        self._method = method
        self._streams = streams
        self._wrong_keys = wrong_keys

    async def refuse(self, _: object, context: _Context) -> None:
        """End the call without reading its request."""
        request_id = _identify(context)
        if self._streams:
            await context.send_initial_metadata(((REQUEST_ID, request_id),))
        if isinstance(self._error, Unauthenticated | Forbidden):
            header = dict(context.invocation_metadata() or ()).get("authorization")
            await asyncio.sleep(self._wrong_keys.record(header if isinstance(header, str) else None, context.peer()))
        await _end(context, self._error, self._method, request_id)


class _WrappedHandler:
    """The handler of one call, which `entered` registers as open."""

    def __init__(self, handler: _Handler, method: str, entered: Callable[[], AbstractContextManager[OpenCall]]) -> None:
        self._entered = entered
        self._parse: Any = handler.request_deserializer
        self._unary: Any = handler.unary_unary
        self._stream: Any = handler.unary_stream or handler.stream_stream
        self._method = method

    async def unary(self, payload: bytes, context: _Context) -> object:
        """Handle one request with one response."""
        request_id = _identify(context)
        context.set_trailing_metadata(((REQUEST_ID, request_id),))
        try:
            with self._entered() as call:
                return await call.wait(self._unary(self._parsed(payload), context))
        except (Exception, asyncio.CancelledError) as error:
            payload = b""  # frees the memory, see `_abort`
            await _end(context, error, self._method, request_id)

    async def stream(self, payload: bytes, context: _Context) -> AsyncIterator[object]:
        """Handle one request with a stream of responses."""
        payloads, payload = [payload], b""  # `pop` below leaves no reference in this frame, see `_abort`
        async with aclosing(self._streamed(lambda: self._parsed(payloads.pop()), context)) as responses:
            async for response in responses:
                yield response

    async def streams(self, payloads: AsyncIterator[bytes], context: _Context) -> AsyncIterator[object]:
        """Handle a stream of requests with a stream of responses."""
        async with aclosing(self._streamed(lambda: self._each_parsed(payloads), context)) as responses:
            async for response in responses:
                yield response

    async def _streamed(self, given: Callable[[], object], context: _Context) -> AsyncGenerator[object, None]:
        request_id = _identify(context)
        await context.send_initial_metadata(((REQUEST_ID, request_id),))
        try:
            with self._entered() as call:
                responses = self._stream(given(), context)
                if isinstance(responses, Awaitable):  # a handler that uses `context.write`
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
            if len(payload) > 2 * MAX_FIELDS:  # no field takes less than two bytes
                # The generated code parses with `Message.FromString`, a bound method of the message class.
                check_fields(payload, self._parse.__self__.DESCRIPTOR)
            return self._parse(payload)
        except TooManyFields:
            raise InvalidRequest(
                Violation("request", f"has more than {MAX_FIELDS} fields; send smaller requests")
            ) from None
        except DecodeError:
            raise InvalidRequest(Violation("request", "is not a valid message of this rpc's request type")) from None


def _identify(context: _Context) -> str:
    """Return the caller's request id, or a new one.

    Streams return it in the initial metadata. Unary calls return it in the trailing metadata, which needs no extra operation.
    """
    given = dict(context.invocation_metadata() or ()).get(REQUEST_ID, "")
    return given if isinstance(given, str) and 0 < len(given) <= 128 else secrets.token_hex(8)


async def _end(context: _Context, error: BaseException, method: str, request_id: str) -> NoReturn:
    """End the call with the status of an error."""
    if isinstance(error, asyncio.CancelledError):
        # If the client or gRPC cancelled the call, it is over: pass the cancellation on. If the handler's own code raised
        # CancelledError, gRPC would send no status and the caller would hang: abort.
        if context.cancelled() or (task := asyncio.current_task()) is None or task.cancelling():
            raise error
        _log.warning("the handler of %s raised CancelledError", method, extra={"request_id": request_id})
        await context.abort(grpc.StatusCode.ABORTED, "cancelled on the server")
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, RolloutError):
        await _abort(context, status_of(error, request_id), request_id, error)
    _log.error("%s failed", method, exc_info=error, extra={"request_id": request_id})
    await _abort(context, internal(request_id), request_id, error)


async def _abort(context: _Context, status: Status, request_id: str, error: BaseException) -> NoReturn:
    """End the call and drop all references from the error.

    gRPC keeps its own exception in a reference cycle, which keeps everything in the tracebacks alive until the garbage
    collector runs. The collector counts objects, not bytes: refused requests of 50 MB each would fill the memory first.
    """
    error.__traceback__ = error.__context__ = error.__cause__ = None
    rich = rpc_status.to_status(status)
    await context.abort(rich.code, rich.details, (*rich.trailing_metadata, (REQUEST_ID, request_id)))
    raise AssertionError("abort raises")

"""Calls of the gateway in this process (D9). A connection to the own server takes a third of the CPU of a short rollout.

A call runs the server's handler in a task of its own, behind the same interceptors as a call that comes over a connection.
Requests and responses are passed on as bytes, so the two sides share no message. What gRPC does in between is done here:
statuses, deadlines, cancellation, the maximum size of a request, and a stream that waits for its reader.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import aclosing
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias

import grpc
from grpc.aio import AioRpcError, Metadata

_log = logging.getLogger(__name__)
_Code: Final = grpc.StatusCode
# grpc's own types have neither handlers nor messages as parameters.
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Metadata: TypeAlias = "Sequence[tuple[str, str | bytes]]"


@dataclass(frozen=True, slots=True)
class _CallDetails:
    """What interceptors know of a call."""

    method: str
    invocation_metadata: _Metadata


class LocalChannel:
    """A channel to the services of this process. Has the methods of a channel that stubs of unary and streaming responses use.

    Args:
        interceptors: the outermost one first.
        max_message_bytes: maximum size of a request.
    """

    def __init__(self, interceptors: Sequence[grpc.aio.ServerInterceptor], max_message_bytes: int) -> None:
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._most = max_message_bytes
        self._find: Callable[[Any], Awaitable[_Handler | None]] = self._handler
        for interceptor in reversed(interceptors):
            self._find = partial(interceptor.intercept_service, self._find)
        self._tasks: set[asyncio.Task[None]] = set()

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Add services, as `grpc.aio.Server` does."""
        self._handlers += handlers

    def unary_unary(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        _registered_method: bool = False,
    ) -> Callable[..., _Call]:
        """Return a function that calls a method."""
        return partial(self._call, method, request_serializer, response_deserializer)

    unary_stream = unary_unary

    def cancel(self) -> None:
        """Cancel the calls that still run."""
        for task in self._tasks:
            task.cancel()

    def _call(
        self,
        method: str,
        write: Callable[[Any], bytes],
        parse: Callable[[bytes], Any],
        message: object,
        *,
        metadata: _Metadata = (),
        timeout: float | None = None,
    ) -> _Call:
        loop = asyncio.get_running_loop()
        call = _Call(metadata, None if timeout is None else loop.time() + timeout, parse)
        work = call.run(partial(self._find, _CallDetails(method, metadata)), [write(message)], self._most)
        # Without the context variables of the HTTP request, which the rollouts that a call starts would inherit.
        call.task = loop.create_task(work, context=Context())
        self._tasks.add(call.task)
        call.task.add_done_callback(self._tasks.discard)
        return call

    async def _handler(self, details: grpc.HandlerCallDetails) -> _Handler | None:
        return next((found for each in self._handlers if (found := each.service(details)) is not None), None)


class _Context:
    """The methods of `grpc.aio.ServicerContext` that our services and interceptors use."""

    def __init__(self, metadata: _Metadata, ends: float | None) -> None:
        self._metadata = metadata
        self._ends = ends
        self._trailing: _Metadata = ()
        self.failure: AioRpcError | None = None

    def invocation_metadata(self) -> _Metadata:
        return self._metadata

    def peer(self) -> str:
        return "unix:"

    def time_remaining(self) -> float | None:
        return None if self._ends is None else max(0.0, self._ends - asyncio.get_running_loop().time())

    def cancelled(self) -> bool:
        """Return False: the task of a cancelled call is cancelled, which is how handlers hear of it."""
        return False

    async def send_initial_metadata(self, metadata: _Metadata) -> None:
        """Do nothing: the gateway reads no initial metadata."""

    def set_trailing_metadata(self, metadata: _Metadata) -> None:
        self._trailing = metadata

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: _Metadata = ()) -> NoReturn:
        self.failure = _error(code, details, trailing_metadata or self._trailing)
        raise grpc.aio.AbortError


class _Call:
    """One call: an awaitable if it has one response, and an iterator over the responses of a stream.

    It holds one response that was not read; then its handler waits.
    """

    task: asyncio.Task[None]

    def __init__(self, metadata: _Metadata, ends: float | None, parse: Callable[[bytes], Any]) -> None:
        self._ends = ends
        self._parse = parse
        self._context = _Context(metadata, ends)
        self._items: asyncio.Queue[bytes | AioRpcError | None] = asyncio.Queue(1)  # None is the end

    async def run(self, find: Callable[[], Awaitable[_Handler | None]], payload: list[bytes], most: int) -> None:
        """Run the call's handler. `payload` is emptied, so that a call does not keep the bytes of its request."""
        try:
            await self._items.put(await self._failure(find, payload, most))
        except asyncio.CancelledError:
            if self._items.full():
                self._items.get_nowait()
            self._items.put_nowait(_error(_Code.CANCELLED, "the call was cancelled"))
            raise

    async def _failure(
        self, find: Callable[[], Awaitable[_Handler | None]], payload: list[bytes], most: int
    ) -> AioRpcError | None:
        """Run the call's handler and return the status that it ended with; None for OK."""
        try:
            async with asyncio.timeout_at(self._ends):
                return await self._handled(await find(), payload, most)
        except TimeoutError:
            return _error(_Code.DEADLINE_EXCEEDED, "Deadline Exceeded")
        except grpc.aio.AbortError:
            return self._context.failure
        except Exception as error:  # the interceptors let none through, but nobody would hear of one
            _log.exception("a call failed unexpectedly")
            return _error(_Code.UNKNOWN, f"Unexpected {type(error)}")

    async def _handled(self, handler: Any, payload: list[bytes], most: int) -> AioRpcError | None:
        if handler is None:
            return _error(_Code.UNIMPLEMENTED, "Method not found!")
        if (size := len(payload[0])) > most:
            return _error(_Code.RESOURCE_EXHAUSTED, f"SERVER: Received message larger than max ({size} vs. {most})")
        write, context = handler.response_serializer, self._context
        if handler.unary_unary is not None:
            await self._items.put(write(await handler.unary_unary(payload.pop(), context)))
            return None
        responses = (handler.unary_stream or handler.stream_stream)(payload.pop(), context)
        if not isinstance(responses, AsyncGenerator):  # a refused call
            await responses
            return None
        async with aclosing(responses):  # also if the call is cancelled while it waits for its reader
            async for response in responses:
                await self._items.put(write(response))
        return None

    def cancel(self) -> bool:
        """Cancel the call. Has no effect after its end."""
        return self.task.cancel()

    def __await__(self) -> Generator[Any, None, Any]:
        return self.__anext__().__await__()

    def __aiter__(self) -> _Call:
        return self

    async def __anext__(self) -> Any:
        try:
            item = await self._items.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if isinstance(item, bytes):
            return self._parse(item)
        if item is None:
            raise StopAsyncIteration
        raise item


def _error(code: grpc.StatusCode, details: str, metadata: _Metadata = ()) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(*metadata), details)

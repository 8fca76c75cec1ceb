"""What differs between an event loop and threads: how a gRPC channel is opened, called, waited for and closed.

All else is written once, in `_async`. `gateway/unasync.py` writes `_sync` from it, where `SyncChannel` replaces `AsyncChannel`.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Final, NoReturn, Protocol, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from osmosis.rollout.v1.rollout_service_pb2 import (
    RunRolloutRequest,
    RunRolloutResponse,
    WatchRolloutRequest,
    WatchRolloutResponse,
)
from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub

from rollout_client.connection import Settings

if TYPE_CHECKING:
    from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub

_T = TypeVar("_T")
_Q = TypeVar("_Q", bound=Message)
_A = TypeVar("_A", bound=Message)
_CLOSED: Final = "the client is closed"
_FORKED: Final = (
    "the client was made in another process, and gRPC's connections do not survive a fork; make one in each process, "
    "after it was forked"
)
_ANOTHER_LOOP: Final = "the client belongs to the event loop in which it was first used; make one in each loop"

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]
EventResponse: TypeAlias = RunRolloutResponse | WatchRolloutResponse
AsyncEventCall: TypeAlias = (
    "grpc.aio.UnaryStreamCall[RunRolloutRequest, RunRolloutResponse]"
    " | grpc.aio.UnaryStreamCall[WatchRolloutRequest, WatchRolloutResponse]"
)


class EventCall(Protocol):
    """A stream of events from the server."""

    def cancel(self) -> object: ...
    def initial_metadata(self) -> object: ...
    def __next__(self) -> EventResponse: ...


class AsyncChannel:
    """A channel for one event loop. gRPC ties channels to a loop, so ours is opened when one runs."""

    def __init__(self, settings: Settings, channel: grpc.aio.Channel | None) -> None:
        self.settings = settings
        # Read here, since it reads files.
        self._credentials = settings.credentials() if channel is None else None
        self._own = channel is None
        self._channel = channel
        self._stub: RolloutServiceAsyncStub | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = os.getpid()
        self._closed = False

    @property
    def grpc_channel(self) -> grpc.aio.Channel:
        """The channel, for stubs of other services. Raises RuntimeError where nothing can be called."""
        self.check()
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        elif asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(_ANOTHER_LOOP)
        if self._channel is None:
            self._channel = self._open()
        return self._channel

    @property
    def stub(self) -> RolloutServiceAsyncStub:
        """The rpcs. Raises RuntimeError where nothing can be called."""
        channel = self.grpc_channel
        if self._stub is None:
            self._stub = RolloutServiceStub(channel)
        return self._stub

    async def unary(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Q, _A],
        request: _Q,
        timeout: float | None,  # noqa: ASYNC109 - a deadline that the server is told
        metadata: Metadata,
    ) -> _A:
        """The response to one request. Raises grpc.RpcError."""
        return await rpc_result(method(request, timeout=timeout, metadata=metadata))

    async def read(self, call: AsyncEventCall) -> EventResponse | None:
        """The next item of a stream; None after the last one. Raises grpc.RpcError."""
        item = await rpc_result(call.read())
        return item if isinstance(item, EventResponse) else None

    async def initial_metadata(self, call: AsyncEventCall) -> object:
        """What the server sends before the first item; empty where the call failed, which the first read then raises."""
        return await rpc_result(call.initial_metadata())

    def check(self) -> None:
        """Raises RuntimeError where nothing can be called."""
        if self._closed:
            raise RuntimeError(_CLOSED)
        if os.getpid() != self._process:
            raise RuntimeError(_FORKED)

    async def pause(self, seconds: float) -> None:
        """Sleeps. Raises RuntimeError where the client was closed meanwhile."""
        await asyncio.sleep(seconds)
        self.check()

    async def close(self) -> None:
        """Ends calls that are under way, and closes the channel if it is ours."""
        self._closed = True
        if self._own and self._channel is not None:
            await self._channel.close()

    def _open(self) -> grpc.aio.Channel:
        settings, options = self.settings, self.settings.options()
        if self._credentials is None:
            return grpc.aio.insecure_channel(settings.target, options)
        return grpc.aio.secure_channel(settings.target, self._credentials, options)


class SyncChannel:
    """A channel that threads may share."""

    def __init__(self, settings: Settings, channel: grpc.Channel | None) -> None:
        self.settings = settings
        self._own = channel is None
        self._channel = self._open() if channel is None else channel
        self.stub = RolloutServiceStub(self._channel)
        self._closed = threading.Event()
        self._process = os.getpid()

    def unary(
        self, method: grpc.UnaryUnaryMultiCallable[_Q, _A], request: _Q, timeout: float | None, metadata: Metadata
    ) -> _A:
        """The response to one request. Raises grpc.RpcError."""
        return method(request, timeout=timeout, metadata=metadata)

    def read(self, call: EventCall) -> EventResponse | None:
        """The next item of a stream; None after the last one. Raises grpc.RpcError."""
        return next(call, None)

    def initial_metadata(self, call: EventCall) -> object:
        """What the server sends before the first item; empty where the call failed, which the first read then raises."""
        return call.initial_metadata()

    def check(self) -> None:
        """Raises RuntimeError where nothing can be called."""
        if self._closed.is_set():
            raise RuntimeError(_CLOSED)
        if os.getpid() != self._process:
            raise RuntimeError(_FORKED)

    def pause(self, seconds: float) -> None:
        """Sleeps. Raises RuntimeError as soon as the client is closed."""
        if self._closed.wait(seconds):
            raise RuntimeError(_CLOSED)

    def close(self) -> None:
        """Ends calls that are under way, and closes the channel if it is ours."""
        self._closed.set()
        if self._own:
            self._channel.close()

    def _open(self) -> grpc.Channel:
        credentials, options = self.settings.credentials(), self.settings.options()
        if credentials is None:
            return grpc.insecure_channel(self.settings.target, options)
        return grpc.secure_channel(self.settings.target, credentials, options)


async def rpc_result(work: Awaitable[_T]) -> _T:
    """Waits for a call. One that was cancelled while its task was not ends with a grpc.RpcError, as it does in threads."""
    try:
        return await work
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        empty = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, empty, empty, "the call was cancelled here") from None


def refuse_pickling(client: object) -> NoReturn:
    """Raises TypeError: a connection stays in its process, and a key out of pickles."""
    raise TypeError(f"{type(client).__name__} cannot be pickled or copied; make one in each process")

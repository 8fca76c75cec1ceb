"""gRPC channels for asyncio (`AsyncChannel`) and for threads (`SyncChannel`), with the same methods.

Only this module differs between the two clients. All other code is written once, in `_async`. `gateway/unasync.py` generates
`_sync` from it and replaces `AsyncChannel` by `SyncChannel`.
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
from osmosis.rollout.v1.agent_service_pb2_grpc import AgentServiceStub
from osmosis.rollout.v1.rollout_service_pb2 import (
    RunRolloutRequest,
    RunRolloutResponse,
    WatchGroupRequest,
    WatchGroupResponse,
    WatchRolloutRequest,
    WatchRolloutResponse,
)
from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub

from rollout_client.connection import Settings

if TYPE_CHECKING:
    from osmosis.rollout.v1.agent_service_pb2_grpc import AgentServiceAsyncStub
    from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub

_T = TypeVar("_T")
_Q = TypeVar("_Q", bound=Message)
_A = TypeVar("_A", bound=Message)
_CLOSED: Final = "the client is closed"
_FORKED: Final = (
    "the client was created in another process, and gRPC connections do not survive a fork; make one in each process, "
    "after the fork"
)
_ANOTHER_LOOP: Final = "the client is bound to the event loop that used it first; make one in each loop"

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]
EventResponse: TypeAlias = RunRolloutResponse | WatchRolloutResponse | WatchGroupResponse
AsyncEventCall: TypeAlias = (
    "grpc.aio.UnaryStreamCall[RunRolloutRequest, RunRolloutResponse]"
    " | grpc.aio.UnaryStreamCall[WatchRolloutRequest, WatchRolloutResponse]"
    " | grpc.aio.UnaryStreamCall[WatchGroupRequest, WatchGroupResponse]"
)


class EventCall(Protocol):
    """A server-streaming call in the shape of grpc's synchronous API: an iterator of responses."""

    def cancel(self) -> object: ...
    def initial_metadata(self) -> object: ...
    def __next__(self) -> EventResponse: ...


class AsyncChannel:
    """gRPC channel for one event loop. gRPC binds a channel to the running loop, so the first call opens it."""

    def __init__(self, settings: Settings, channel: grpc.aio.Channel | None) -> None:
        self.settings = settings
        # Read now, not at the first call: reading PEM files would block the event loop.
        self._credentials = settings.credentials() if channel is None else None
        self._own = channel is None
        self._channel = channel
        self._stub: RolloutServiceAsyncStub | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = os.getpid()
        self._closed = False

    @property
    def grpc_channel(self) -> grpc.aio.Channel:
        """The channel, for stubs of other services.

        Raises RuntimeError if the client is closed, or belongs to another process or event loop.
        """
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
        """The stub of RolloutService. Raises RuntimeError as `grpc_channel` does."""
        channel = self.grpc_channel
        if self._stub is None:
            self._stub = RolloutServiceStub(channel)
        return self._stub

    @property
    def agents(self) -> AgentServiceAsyncStub:
        """A stub of AgentService. Raises RuntimeError as `grpc_channel` does."""
        return AgentServiceStub(self.grpc_channel)

    async def unary(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Q, _A],
        request: _Q,
        timeout: float | None,  # noqa: ASYNC109 - sent to the server as the deadline
        metadata: Metadata,
    ) -> _A:
        """Send one request and return its response. `timeout` is in seconds. Raises grpc.RpcError."""
        return await rpc_result(method(request, timeout=timeout, metadata=metadata))

    async def read(self, call: AsyncEventCall) -> EventResponse | None:
        """Return the next item of a stream, or None after the last one. Raises grpc.RpcError."""
        item = await rpc_result(call.read())
        return item if isinstance(item, EventResponse) else None

    async def initial_metadata(self, call: AsyncEventCall) -> object:
        """Return the headers of the response. They are empty if the call failed; the first `read` raises its error."""
        return await rpc_result(call.initial_metadata())

    def check(self) -> None:
        """Raise RuntimeError if the client is closed, or was created in another process."""
        if self._closed:
            raise RuntimeError(_CLOSED)
        if os.getpid() != self._process:
            raise RuntimeError(_FORKED)

    async def pause(self, seconds: float) -> None:
        """Sleep. Raises RuntimeError afterwards if the client was closed during the sleep."""
        await asyncio.sleep(seconds)
        self.check()

    async def close(self) -> None:
        """Close the client. If it opened its channel, close the channel and cancel its open calls."""
        self._closed = True
        if self._own and self._channel is not None:
            await self._channel.close()

    def _open(self) -> grpc.aio.Channel:
        settings, options = self.settings, self.settings.options()
        if self._credentials is None:
            return grpc.aio.insecure_channel(settings.target, options)
        return grpc.aio.secure_channel(settings.target, self._credentials, options)


class SyncChannel:
    """gRPC channel that threads may share."""

    def __init__(self, settings: Settings, channel: grpc.Channel | None) -> None:
        self.settings = settings
        self._own = channel is None
        self._channel = self._open() if channel is None else channel
        self.stub = RolloutServiceStub(self._channel)
        self._closed = threading.Event()
        self._process = os.getpid()

    @property
    def agents(self) -> AgentServiceStub:
        """A stub of AgentService."""
        return AgentServiceStub(self._channel)

    def unary(
        self, method: grpc.UnaryUnaryMultiCallable[_Q, _A], request: _Q, timeout: float | None, metadata: Metadata
    ) -> _A:
        """Send one request and return its response. `timeout` is in seconds. Raises grpc.RpcError."""
        return method(request, timeout=timeout, metadata=metadata)

    def read(self, call: EventCall) -> EventResponse | None:
        """Return the next item of a stream, or None after the last one. Raises grpc.RpcError."""
        return next(call, None)

    def initial_metadata(self, call: EventCall) -> object:
        """Return the headers of the response. They are empty if the call failed; the first `read` raises its error."""
        return call.initial_metadata()

    def check(self) -> None:
        """Raise RuntimeError if the client is closed, or was created in another process."""
        if self._closed.is_set():
            raise RuntimeError(_CLOSED)
        if os.getpid() != self._process:
            raise RuntimeError(_FORKED)

    def pause(self, seconds: float) -> None:
        """Sleep. Raises RuntimeError as soon as another thread closes the client."""
        if self._closed.wait(seconds):
            raise RuntimeError(_CLOSED)

    def close(self) -> None:
        """Close the client. If it opened its channel, close the channel and cancel its open calls."""
        self._closed.set()
        if self._own:
            self._channel.close()

    def _open(self) -> grpc.Channel:
        credentials, options = self.settings.credentials(), self.settings.options()
        if credentials is None:
            return grpc.insecure_channel(self.settings.target, options)
        return grpc.secure_channel(self.settings.target, credentials, options)


async def rpc_result(work: Awaitable[_T]) -> _T:
    """Await a gRPC call. A call that was cancelled raises grpc.RpcError, unless the current task is being cancelled.

    grpc.aio raises CancelledError also if only the call was cancelled, for example because the channel was closed. That error
    must not pass for a cancellation of the task. The synchronous API raises grpc.RpcError there.
    """
    try:
        return await work
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        empty = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.CANCELLED, empty, empty, "the call was cancelled by this client"
        ) from None


def refuse_pickling(client: object) -> NoReturn:
    """Raise TypeError: a connection cannot move to another process, and a pickle must not contain an API key."""
    raise TypeError(f"{type(client).__name__} cannot be pickled or copied; make one in each process")

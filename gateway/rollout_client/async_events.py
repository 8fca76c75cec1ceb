"""Events as an asynchronous iterator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self, TypeAlias

import grpc
import grpc.aio
from osmosis.rollout.v1.event_pb2 import RolloutEvent
from osmosis.rollout.v1.rollout_service_pb2 import (
    RunRolloutRequest,
    RunRolloutResponse,
    WatchRolloutRequest,
    WatchRolloutResponse,
)

from rollout_client.async_calls import AsyncCalls
from rollout_client.connection import CallMetadata
from rollout_client.errors import failure_of
from rollout_client.event_cursor import Following, Reader, Started

_Call: TypeAlias = (
    "grpc.aio.UnaryStreamCall[RunRolloutRequest, RunRolloutResponse]"
    " | grpc.aio.UnaryStreamCall[WatchRolloutRequest, WatchRolloutResponse]"
)


class AsyncEventStream(Reader, AsyncIterator[RolloutEvent]):
    """The events of a rollout, to its end: an iterator that goes on by itself after cut connections.

    It calls the server once it is iterated. `aclose()`, the end of an `async with` block, and letting go of the iterator (as
    leaving an `async for` loop over it does) end the call: one is then detached from the rollout. Iterating raises RolloutError.

    A task that is cancelled while it waits for an event loses none: the next one continues after the last event that came.
    """

    def __init__(self, calls: AsyncCalls, following: Following, call_metadata: CallMetadata | None) -> None:
        self._call: _Call | None = None
        self._calls = calls
        self._following = following
        self._request_id, self._metadata = calls.settings.metadata(call_metadata)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RolloutEvent:
        while not self._following.over:
            event = await self._read()
            if event is not None:
                return event
        self._hang_up()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Ends the iteration and detaches from the rollout."""
        self._following.over = True
        self._hang_up()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # An iterator whose making failed has no call.
        if getattr(self, "_call", None) is not None:
            self._hang_up()

    async def _read(self) -> RolloutEvent | None:
        """The next event; None after an item without one, after a cut and its pause, and at the end."""
        failure = None
        try:
            item = await (await self._connected()).read()
            if isinstance(item, RunRolloutResponse | WatchRolloutResponse):
                return self._following.took(item)
        except grpc.RpcError as error:
            failure = failure_of(error, self._request_id)
        except asyncio.CancelledError:
            self._hang_up()
            if self._following.over:  # closed by another task
                return None
            self._calls.cancelled()
            raise
        self._hang_up()
        if self._following.over:
            return None
        self._calls.check()
        following = self._following
        await self._calls.pause(following.ended(self._request_id) if failure is None else following.failed(failure))
        return None

    async def _connected(self) -> _Call:
        if self._call is None:
            self._call = call = self._open()
            # Empty where the call failed, which the first item then tells.
            if await call.initial_metadata():
                self._following.connected()
        return self._call

    def _open(self) -> _Call:
        following, stub = self._following, self._calls.stub
        run, timeout = following.run_request(), following.timeout()
        if run is not None:
            return stub.RunRollout(run, timeout=timeout, metadata=self._metadata)
        return stub.WatchRollout(following.watch_request(), timeout=timeout, metadata=self._metadata)

    def _hang_up(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()


class AsyncRunStream(AsyncEventStream):
    """The events of a rollout that this stream starts."""

    async def started(self) -> Started:
        """Starts the rollout, or finds the one with the same request id. Raises RolloutError."""
        while (started := self._following.started) is None:
            if self._following.over:
                raise RuntimeError("the stream was closed before its rollout had started")
            await self._read()
        return started

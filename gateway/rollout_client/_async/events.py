"""Event streams as asynchronous iterators."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self, TypeVar

import grpc.aio
from osmosis.rollout.v1.event_pb2 import RolloutEvent
from osmosis.rollout.v1.group_pb2 import GroupResult
from osmosis.rollout.v1.rollout_service_pb2 import GroupOutcome

from rollout_client.channels import AsyncChannel, AsyncEventCall
from rollout_client.connection import CallMetadata
from rollout_client.errors import failure_of
from rollout_client.event_cursor import EventCursor, GroupCursor, ResumeCursor, Started, StreamState

_T = TypeVar("_T")


class AsyncResumingStream(ABC, AsyncIterator[_T]):
    """Iterator over a stream that reconnects after a lost connection and continues after the last item.

    The first iteration connects. `aclose()`, leaving its `async with` block, or dropping the last reference (such as leaving
    `async for event in client.watch(uid)`) closes the call and detaches the client. Iterating raises RolloutError.

    Interrupting an iteration loses no item: the next one continues after the last item that was returned.
    """

    def __init__(self, channel: AsyncChannel, cursor: ResumeCursor[_T], call_metadata: CallMetadata | None) -> None:
        self._call: AsyncEventCall | None = None
        self._channel = channel
        self._cursor = cursor
        self._request_id, self._metadata = channel.settings.metadata(call_metadata)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _T:
        while not self._cursor.over:
            item = await self._read()
            if item is not None:
                return item
        self._hang_up()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the iteration and detach from the rollout."""
        self._cursor.over = True
        self._hang_up()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # If __init__ raised, the attribute does not exist.
        if getattr(self, "_call", None) is not None:
            self._hang_up()

    async def _read(self) -> _T | None:
        """Return the next item. None: one to skip, a lost connection after its pause, or the end."""
        self._channel.check()
        failure = None
        try:
            item = await self._channel.read(await self._connected_call())
            if item is not None:
                return self._cursor.take(item)
        except grpc.RpcError as error:
            failure = failure_of(error, self._request_id)
        except BaseException:
            # Cancellation or Ctrl-C. An item may be lost inside gRPC, so the next iteration reconnects and requests it again.
            self._hang_up()
            raise
        self._hang_up()
        cursor = self._cursor
        if cursor.over:
            return None
        self._channel.check()
        await self._channel.pause(cursor.on_end(self._request_id) if failure is None else cursor.on_failure(failure))
        return None

    async def _connected_call(self) -> AsyncEventCall:
        if self._call is None:
            self._call = call = self._open()
            if self._cursor.over:
                # Another thread closed the stream before `_call` was set, and so had no call to cancel.
                call.cancel()
            if await self._channel.initial_metadata(call):
                self._cursor.on_connect()
        return self._call

    @abstractmethod
    def _open(self) -> AsyncEventCall: ...

    def _hang_up(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            with contextlib.suppress(grpc.RpcError):
                call.cancel()


class AsyncEventStream(StreamState, AsyncResumingStream[RolloutEvent]):
    """Iterator over a rollout's events until its end. It reconnects after a lost connection and continues after the last event."""

    _cursor: EventCursor

    def _open(self) -> AsyncEventCall:
        cursor, stub = self._cursor, self._channel.stub
        run, timeout = cursor.run_request(), cursor.timeout()
        if run is not None:
            return stub.RunRollout(run, timeout=timeout, metadata=self._metadata)
        return stub.WatchRollout(cursor.watch_request(), timeout=timeout, metadata=self._metadata)


class AsyncGroupStream(AsyncResumingStream[GroupOutcome]):
    """Iterator over the outcomes of a group in the order in which its rollouts end. Its end is the end of the group.

    It reconnects after a lost connection and continues after the last outcome.
    """

    _cursor: GroupCursor

    @property
    def last_sequence(self) -> int:
        """Sequence number of the last item received; `after_sequence` before the first."""
        return self._cursor.watch.after_sequence

    @property
    def result(self) -> GroupResult | None:
        """The result of the group: how many rollouts are usable, failed and so on. None until the group has ended."""
        return self._cursor.result

    def _open(self) -> AsyncEventCall:
        cursor = self._cursor
        return self._channel.stub.WatchGroup(cursor.watch, timeout=cursor.timeout(), metadata=self._metadata)


class AsyncRunStream(AsyncEventStream):
    """Events of a rollout that this stream starts when it is first iterated."""

    async def started(self) -> Started:
        """Start the rollout, or find the one with the same request id, and return it without waiting for an event.

        Raises RolloutError as `start` does, and RuntimeError if the stream was closed before the rollout had started.
        """
        while (started := self._cursor.started) is None:
            if self._cursor.over:
                raise RuntimeError("the stream was closed before its rollout had started")
            await self._read()
        return started

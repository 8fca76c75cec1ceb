# Generated from rollout_client/_async/events.py by gateway/unasync.py. Change that file, then run `make sync-client`.
"""Event streams as iterators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import grpc
from osmosis.rollout.v1.event_pb2 import RolloutEvent

from rollout_client.channels import EventCall, SyncChannel
from rollout_client.connection import CallMetadata
from rollout_client.errors import failure_of
from rollout_client.event_cursor import EventCursor, Started, StreamState


class EventStream(StreamState, Iterator[RolloutEvent]):
    """Iterator over a rollout's events until its end. It reconnects after a lost connection and continues after the last event.

    The first iteration connects. `close()`, leaving its `with` block, or dropping the last reference (such as leaving
    `for event in client.watch(uid)`) closes the call and detaches the client. Iterating raises RolloutError.

    Interrupting an iteration loses no event: the next one continues after the last event that was returned.
    """

    def __init__(self, channel: SyncChannel, cursor: EventCursor, call_metadata: CallMetadata | None) -> None:
        self._call: EventCall | None = None
        self._channel = channel
        self._cursor = cursor
        self._request_id, self._metadata = channel.settings.metadata(call_metadata)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RolloutEvent:
        while not self._cursor.over:
            event = self._read()
            if event is not None:
                return event
        self._hang_up()
        raise StopIteration

    def close(self) -> None:
        """End the iteration and detach from the rollout. May be called from any thread."""
        self._cursor.over = True
        self._hang_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # If __init__ raised, the attribute does not exist.
        if getattr(self, "_call", None) is not None:
            self._hang_up()

    def _read(self) -> RolloutEvent | None:
        """Return the next event. None: an item without event, a lost connection after its pause, or the end."""
        self._channel.check()
        failure = None
        try:
            item = self._channel.read(self._connected_call())
            if item is not None:
                return self._cursor.take(item)
        except grpc.RpcError as error:
            failure = failure_of(error, self._request_id)
        except BaseException:
            # Cancellation or Ctrl-C. An item may be lost inside gRPC, so the next iteration reconnects and requests it again.
            self._hang_up()
            raise
        self._hang_up()
        if self._cursor.over:
            return None
        self._channel.check()
        cursor = self._cursor
        self._channel.pause(cursor.on_end(self._request_id) if failure is None else cursor.on_failure(failure))
        return None

    def _connected_call(self) -> EventCall:
        if self._call is None:
            self._call = call = self._open()
            if self._cursor.over:
                # Another thread closed the stream before `_call` was set, and so had no call to cancel.
                call.cancel()
            if self._channel.initial_metadata(call):
                self._cursor.on_connect()
        return self._call

    def _open(self) -> EventCall:
        cursor, stub = self._cursor, self._channel.stub
        run, timeout = cursor.run_request(), cursor.timeout()
        if run is not None:
            return stub.RunRollout(run, timeout=timeout, metadata=self._metadata)
        return stub.WatchRollout(cursor.watch_request(), timeout=timeout, metadata=self._metadata)

    def _hang_up(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            with contextlib.suppress(grpc.RpcError):
                call.cancel()


class RunStream(EventStream):
    """Events of a rollout that this stream starts when it is first iterated."""

    def started(self) -> Started:
        """Start the rollout, or find the one with the same request id, and return it without waiting for an event.

        Raises RolloutError as `start` does, and RuntimeError if the stream was closed before the rollout had started.
        """
        while (started := self._cursor.started) is None:
            if self._cursor.over:
                raise RuntimeError("the stream was closed before its rollout had started")
            self._read()
        return started

"""Events as an iterator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, Self, TypeAlias

import grpc
from osmosis.rollout.v1.event_pb2 import RolloutEvent
from osmosis.rollout.v1.rollout_service_pb2 import RunRolloutResponse, WatchRolloutResponse

from rollout_client.calls import Calls
from rollout_client.connection import CallMetadata
from rollout_client.errors import failure_of
from rollout_client.event_cursor import Following, Reader, Started

_Item: TypeAlias = RunRolloutResponse | WatchRolloutResponse


class _EventCall(Protocol):
    """A stream that the server sends."""

    def cancel(self) -> object: ...
    def initial_metadata(self) -> object: ...
    def __next__(self) -> _Item: ...


class EventStream(Reader, Iterator[RolloutEvent]):
    """The events of a rollout, to its end: an iterator that goes on by itself after cut connections.

    It calls the server once it is iterated. `close()`, the end of a `with` block, and letting go of the iterator (as leaving
    a `for` loop over it does) end the call: one is then detached from the rollout. Iterating raises RolloutError.
    """

    def __init__(self, calls: Calls, following: Following, call_metadata: CallMetadata | None) -> None:
        self._call: _EventCall | None = None
        self._calls = calls
        self._following = following
        self._request_id, self._metadata = calls.settings.metadata(call_metadata)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RolloutEvent:
        while not self._following.over:
            event = self._read()
            if event is not None:
                return event
        self._hang_up()
        raise StopIteration

    def close(self) -> None:
        """Ends the iteration and detaches from the rollout. May be called from any thread."""
        self._following.over = True
        self._hang_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # An iterator whose making failed has no call.
        if getattr(self, "_call", None) is not None:
            self._hang_up()

    def _read(self) -> RolloutEvent | None:
        """The next event; None after an item without one, after a cut and its pause, and at the end."""
        self._calls.check()
        try:
            return self._following.took(next(self._connected()))
        except StopIteration:
            failure = None
        except grpc.RpcError as error:
            failure = failure_of(error, self._request_id)
        except BaseException:  # Ctrl-C
            self._hang_up()
            raise
        self._hang_up()
        if self._following.over:
            return None
        self._calls.check()
        following = self._following
        self._calls.pause(following.ended(self._request_id) if failure is None else following.failed(failure))
        return None

    def _connected(self) -> _EventCall:
        if self._call is None:
            self._call = call = self._open()
            if self._following.over:  # closed by another thread in this moment
                call.cancel()
            # Empty where the call failed, which the first item then tells.
            if call.initial_metadata():
                self._following.connected()
        return self._call

    def _open(self) -> _EventCall:
        following, stub = self._following, self._calls.stub
        run, timeout = following.run_request(), following.timeout()
        if run is not None:
            return stub.RunRollout(run, timeout=timeout, metadata=self._metadata)
        return stub.WatchRollout(following.watch_request(), timeout=timeout, metadata=self._metadata)

    def _hang_up(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            with contextlib.suppress(grpc.RpcError):
                call.cancel()


class RunStream(EventStream):
    """The events of a rollout that this stream starts."""

    def started(self) -> Started:
        """Starts the rollout, or finds the one with the same request id. Raises RolloutError."""
        while (started := self._following.started) is None:
            if self._following.over:
                raise RuntimeError("the stream was closed before its rollout had started")
            self._read()
        return started

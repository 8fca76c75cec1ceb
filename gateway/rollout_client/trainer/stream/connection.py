"""One logical stream over consecutive connections.

After a lost connection the next one resumes the stream: each side reports the last item it received, and the other continues
after it. The server keeps a disconnected stream for its grace time, then refuses it with `STREAM_EXPIRED`, as a server does that
was restarted. A `StreamTransport` then opens another stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeAlias

import grpc
import grpc.aio
from osmosis.rollout.v1.trainer_service_pb2 import (
    TrainAcknowledge,
    TrainHello,
    TrainRequest,
    TrainResponse,
    TrainWelcome,
)
from osmosis.rollout.v1.trainer_service_pb2_grpc import TrainerServiceStub

from rollout_client.channels import AsyncChannel, rpc_result
from rollout_client.errors import NotPossible, RolloutError, ServerFault, Unavailable, failure_of
from rollout_client.proto_fields import duration_seconds
from rollout_client.retry import Attempts, Retry
from rollout_client.trainer.stream.buffers import StreamInbox, StreamOutbox

EXPIRED: Final = "STREAM_EXPIRED"
_RESUMABLE: Final = frozenset({"STREAM_TAKEN", "TOO_MANY_REFUSALS"})
"""Errors that end a connection but not the stream. The stream id is secret, so a connection that took the stream over can only be
an earlier attempt of this trainer that arrived late."""
_MOST_CREDIT: Final = 1_000_000
_FAREWELL_SECONDS: Final = 2.0
"""Time for sending the remaining items on close."""
_TOGETHER, _TOGETHER_SECONDS = 16, 0.02
"""How many items are acknowledged together, and how long the writer waits for the next one. An acknowledgement costs the server as
much as an answer."""

_Call: TypeAlias = "grpc.aio.StreamStreamCall[TrainRequest, TrainResponse]"


class StreamConnection:
    """Sends the items of `outbox` and passes received items to `receive`, from `open` to `close`.

    Args:
        channel: channel of a client.
        credit: maximum number of completion requests in progress.
        outbox: items to send.
        receive: called with each item except the welcome, once and in order.
        idle: request `idle` items.
    """

    def __init__(
        self,
        channel: AsyncChannel,
        credit: int,
        outbox: StreamOutbox,
        receive: Callable[[TrainResponse], None],
        *,
        idle: bool = False,
    ) -> None:
        self._channel = channel
        self._credit = min(credit, _MOST_CREDIT)
        self._outbox = outbox
        self._receive = receive
        self._idle = idle
        self._inbox = StreamInbox()
        self._stream_id = ""
        self._attempts = Attempts(channel.settings.retry)
        self._welcome = asyncio.Event()
        self._connected = self._closing = False
        self._task: asyncio.Task[None] | None = None

    @property
    def over(self) -> asyncio.Task[None]:
        """Task that ends with the stream. It raises the RolloutError that ended it, or returns after `close`."""
        if self._task is None:
            raise RuntimeError("the stream is not open")
        return self._task

    async def open(self) -> None:
        """Connect. Raises RolloutError if the server is unreachable for too long or does not support trainer streams."""
        self._task = asyncio.create_task(self._run())
        welcome = asyncio.create_task(self._welcome.wait())
        try:
            await asyncio.wait((self._task, welcome), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        finally:
            welcome.cancel()
        if self._task.done():
            self._task.result()

    async def close(self) -> None:
        """Send the remaining items, for at most 2 s and only if connected, and disconnect."""
        if self._task is None:
            return
        self._closing = True
        self._outbox.notify()
        if self._connected:
            await asyncio.wait((self._task,), timeout=_FAREWELL_SECONDS)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        settings = self._channel.settings
        while not self._closing:
            request_id, metadata = settings.metadata(None)
            stub = TrainerServiceStub(self._channel.grpc_channel)
            call: _Call = stub.Train(metadata=metadata)
            failure: RolloutError = Unavailable(grpc.StatusCode.UNAVAILABLE, "the server ended the stream")
            try:
                await rpc_result(self._serve(call))
            except grpc.RpcError as error:
                failure = failure_of(error, request_id)
            finally:
                self._connected = False
                call.cancel()
            if not self._closing:
                self._channel.check()
                await self._channel.pause(self._attempts.on_failure(_stream_failure(failure)))

    async def _serve(self, call: _Call) -> None:
        """Transfer items over one connection until it ends."""
        await call.write(TrainRequest(hello=self._hello()))
        first = await call.read()
        if not isinstance(first, TrainResponse):
            return
        if not first.HasField("welcome"):
            raise ServerFault(
                grpc.StatusCode.INTERNAL, f"the first item of the server is {first.WhichOneof('item')}, not welcome"
            )
        self._on_welcome(first.welcome)
        parts = reader, writer = asyncio.create_task(self._read(call)), asyncio.create_task(self._write(call))
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
            # The writer ends first after a half-close or an error. The reader then receives the last items or the status.
            await reader
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    def _hello(self) -> TrainHello:
        last_seen = self._inbox.last_seen
        return TrainHello(stream_id=self._stream_id, last_seen=last_seen, credit=self._credit, idle=self._idle)

    def _on_welcome(self, welcome: TrainWelcome) -> None:
        if self._stream_id and welcome.stream_id != self._stream_id:
            text = "the server does not know this stream; it was dropped, or the server has restarted"
            raise NotPossible(grpc.StatusCode.FAILED_PRECONDITION, text, reason=EXPIRED)
        if not self._stream_id:
            self._stream_id = welcome.stream_id
            self._attempts = Attempts(self._resume_policy(duration_seconds(welcome.grace)))
        self._connected = True
        self._attempts.on_connect()
        self._inbox.reconnect()
        self._outbox.reconnect(welcome.last_seen)
        self._outbox.notify()
        self._welcome.set()

    async def _read(self, call: _Call) -> None:
        while isinstance(item := await call.read(), TrainResponse):
            if not self._inbox.accept(item.sequence):
                continue
            if item.sequence:
                self._attempts.on_progress()
                self._outbox.notify()
            if item.HasField("acknowledge"):
                self._outbox.acknowledge(item.acknowledge.sequence)
            else:
                self._receive(item)

    async def _write(self, call: _Call) -> None:
        """Send queued items, and acknowledge received ones together when the queue is empty.

        Errors end this method without an exception, because the reader receives the status of the call.
        """
        try:
            while True:
                item, waiting = self._outbox.next_item(), self._inbox.unacknowledged
                if item is not None:
                    await call.write(item)
                elif not waiting:
                    if self._closing:
                        await call.done_writing()
                        return
                    await self._outbox.wait()
                elif self._closing or waiting >= _TOGETHER or not await self._outbox.wait(_TOGETHER_SECONDS):
                    sequence = self._inbox.next_acknowledgement()
                    await call.write(TrainRequest(acknowledge=TrainAcknowledge(sequence=sequence)))
        except (grpc.RpcError, asyncio.InvalidStateError):
            return

    def _resume_policy(self, grace: float) -> Retry:
        """Return the retry policy for resuming: at least for the grace time, with several attempts within it."""
        retry = self._channel.settings.retry
        longest = min(retry.longest, grace / 4)
        return replace(retry, patience=max(retry.patience, grace), first=min(retry.first, longest), longest=longest)


def _stream_failure(failure: RolloutError) -> RolloutError:
    """Translate the failure of a connection: errors after which the stream can be resumed become retryable."""
    if failure.reason in _RESUMABLE:
        return Unavailable(grpc.StatusCode.UNAVAILABLE, failure.message, request_id=failure.request_id)
    if failure.code is grpc.StatusCode.UNIMPLEMENTED:
        text = "the server does not support trainer streams; use Trainer(serving=Serving(...)), so that it calls back"
        return RolloutError(failure.code, text, request_id=failure.request_id)
    return failure

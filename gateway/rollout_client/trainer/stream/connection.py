"""One stream over as many connections as it takes.

A connection that breaks is followed by another one, which goes on where both sides were: each tells the last item that it saw,
and is sent what follows. The server keeps a cut stream for its grace time, and says so where that is over.
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
"""Ends of a connection, not of the stream. Nobody else knows its id, so what took it is an earlier connection that came late."""
_MOST_CREDIT: Final = 1_000_000
_FAREWELL_SECONDS: Final = 2.0
"""How long the last items may take to leave."""

_Call: TypeAlias = "grpc.aio.StreamStreamCall[TrainRequest, TrainResponse]"


class StreamConnection:
    """Carries what is put into `outbox` there, and what comes back to `receive`, from `open` to `close`.

    Args:
        channel: of a client.
        credit: completion requests that may be under way at once.
        outbox: what is sent.
        receive: is called with each item but the first, once and in order.
    """

    def __init__(
        self, channel: AsyncChannel, credit: int, outbox: StreamOutbox, receive: Callable[[TrainResponse], None]
    ) -> None:
        self._channel = channel
        self._credit = min(credit, _MOST_CREDIT)
        self._outbox = outbox
        self._receive = receive
        self._inbox = StreamInbox()
        self._stream_id = ""
        self._attempts = Attempts(channel.settings.retry)
        self._welcome = asyncio.Event()
        self._connected = self._closing = False
        self._task: asyncio.Task[None] | None = None

    @property
    def over(self) -> asyncio.Task[None]:
        """Is done once nothing is carried any more; then with the RolloutError that says why, unless it was closed."""
        if self._task is None:
            raise RuntimeError("the stream is not open")
        return self._task

    async def open(self) -> None:
        """Connects. Raises RolloutError where the server cannot be reached for too long, or takes no trainer."""
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
        """Sends what is left, as far as that is possible at once, and hangs up."""
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
        """Carries items over one connection, until it ends."""
        await call.write(TrainRequest(hello=self._hello()))
        first = await call.read()
        if not isinstance(first, TrainResponse):
            return
        if not first.HasField("welcome"):
            raise ServerFault(
                grpc.StatusCode.INTERNAL, f"the server began with {first.WhichOneof('item')}, not welcome"
            )
        self._on_welcome(first.welcome)
        parts = reader, writer = asyncio.create_task(self._read(call)), asyncio.create_task(self._write(call))
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
            await reader
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    def _hello(self) -> TrainHello:
        return TrainHello(stream_id=self._stream_id, last_seen=self._inbox.last_seen, credit=self._credit)

    def _on_welcome(self, welcome: TrainWelcome) -> None:
        if self._stream_id and welcome.stream_id != self._stream_id:
            text = "the server does not know this stream any more"
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
        """Sends what there is, and acknowledges what came once there is nothing else. The reader tells why a call ended."""
        try:
            while True:
                if (item := self._outbox.next_item()) is not None:
                    await call.write(item)
                elif (sequence := self._inbox.next_acknowledgement()) is not None:
                    await call.write(TrainRequest(acknowledge=TrainAcknowledge(sequence=sequence)))
                elif self._closing:
                    await call.done_writing()
                    return
                else:
                    await self._outbox.wait()
        except (grpc.RpcError, asyncio.InvalidStateError):
            return

    def _resume_policy(self, grace: float) -> Retry:
        """How a stream is resumed: for as long as the server keeps it, with several attempts in that time."""
        retry = self._channel.settings.retry
        longest = min(retry.longest, grace / 4)
        return replace(retry, patience=max(retry.patience, grace), first=min(retry.first, longest), longest=longest)


def _stream_failure(failure: RolloutError) -> RolloutError:
    """A failure, as what it means for the stream."""
    if failure.reason in _RESUMABLE:
        return Unavailable(grpc.StatusCode.UNAVAILABLE, failure.message, request_id=failure.request_id)
    if failure.code is grpc.StatusCode.UNIMPLEMENTED:
        text = "the server has no streams for trainers; give Trainer(serving=Serving(...)), so that it calls back"
        return RolloutError(failure.code, text, request_id=failure.request_id)
    return failure

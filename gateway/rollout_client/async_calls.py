"""Calls from an event loop."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Final, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub

from rollout_client.calls import CLOSED, FORKED
from rollout_client.connection import CallMetadata, Settings
from rollout_client.errors import failure_of
from rollout_client.unary_retry import Exchange

if TYPE_CHECKING:
    from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub

_Q = TypeVar("_Q", bound=Message)
_A = TypeVar("_A", bound=Message)
_ANOTHER_LOOP: Final = "the client belongs to the event loop in which it was first used; make one in each loop"


class AsyncCalls:
    """A channel, and what is done over it. gRPC ties channels to a loop, so ours is made when one runs."""

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
    def channel(self) -> grpc.aio.Channel:
        """The channel, for stubs of one's own. Raises RuntimeError where nothing can be called."""
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
        channel = self.channel
        if self._stub is None:
            self._stub = RolloutServiceStub(channel)
        return self._stub

    async def answer(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Q, _A],
        exchange: Exchange[_Q, _A],
        call_metadata: CallMetadata | None,
    ) -> _A:
        """The answer to a request, however many attempts it takes. Raises RolloutError."""
        request_id, metadata = self.settings.metadata(call_metadata)
        while True:
            self.check()
            try:
                answer = await method(exchange.request(), timeout=exchange.timeout(), metadata=metadata)
            except grpc.RpcError as error:
                failure = failure_of(error, request_id)
            except asyncio.CancelledError:
                self.cancelled()
                raise
            else:
                if exchange.is_answered(answer):
                    return answer
                continue
            self.check()
            await self.pause(exchange.failed(failure))

    def check(self) -> None:
        """Raises RuntimeError where nothing can be called."""
        if self._closed:
            raise RuntimeError(CLOSED)
        if os.getpid() != self._process:
            raise RuntimeError(FORKED)

    def cancelled(self) -> None:
        """Raises RuntimeError where a call was cancelled because the client was closed, and not the task that waits for it."""
        task = asyncio.current_task()
        if self._closed and (task is None or not task.cancelling()):
            raise RuntimeError(CLOSED) from None

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

"""Calls from threads."""

from __future__ import annotations

import os
import threading
from typing import Final, NoReturn, TypeVar

import grpc
from google.protobuf.message import Message
from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub

from rollout_client.connection import CallMetadata, Settings
from rollout_client.errors import failure_of
from rollout_client.unary_retry import Exchange

_Q = TypeVar("_Q", bound=Message)
_A = TypeVar("_A", bound=Message)
CLOSED: Final = "the client is closed"
FORKED: Final = (
    "the client was made in another process, and gRPC's connections do not survive a fork; make one in each process, "
    "after it was forked"
)


class Calls:
    """A channel, and what is done over it. Threads may share it."""

    def __init__(self, settings: Settings, channel: grpc.Channel | None) -> None:
        self.settings = settings
        self._own = channel is None
        self._channel = _open(settings) if channel is None else channel
        self.stub = RolloutServiceStub(self._channel)
        self._closed = threading.Event()
        self._process = os.getpid()

    def answer(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Q, _A],
        exchange: Exchange[_Q, _A],
        call_metadata: CallMetadata | None,
    ) -> _A:
        """The answer to a request, however many attempts it takes. Raises RolloutError."""
        request_id, metadata = self.settings.metadata(call_metadata)
        while True:
            self.check()
            try:
                answer = method(exchange.request(), timeout=exchange.timeout(), metadata=metadata)
            except grpc.RpcError as error:
                failure = failure_of(error, request_id)
            else:
                if exchange.is_answered(answer):
                    return answer
                continue
            self.check()
            self.pause(exchange.failed(failure))

    def check(self) -> None:
        """Raises RuntimeError where nothing can be called."""
        if self._closed.is_set():
            raise RuntimeError(CLOSED)
        if os.getpid() != self._process:
            raise RuntimeError(FORKED)

    def pause(self, seconds: float) -> None:
        """Sleeps. Raises RuntimeError as soon as the client is closed."""
        if self._closed.wait(seconds):
            raise RuntimeError(CLOSED)

    def close(self) -> None:
        """Ends calls that are under way, and closes the channel if it is ours."""
        self._closed.set()
        if self._own:
            self._channel.close()


def not_pickled(client: object) -> NoReturn:
    """Raises TypeError: a connection stays in its process, and a key out of pickles."""
    raise TypeError(f"{type(client).__name__} cannot be pickled or copied; make one in each process")


def _open(settings: Settings) -> grpc.Channel:
    credentials, options = settings.credentials(), settings.options()
    if credentials is None:
        return grpc.insecure_channel(settings.target, options)
    return grpc.secure_channel(settings.target, credentials, options)

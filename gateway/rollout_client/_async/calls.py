"""Unary calls of the client for asyncio, and its end."""

from __future__ import annotations

from types import TracebackType
from typing import NoReturn, Self, TypeVar

import grpc.aio
from google.protobuf.message import Message

from rollout_client.channels import AsyncChannel, refuse_pickling
from rollout_client.connection import CallMetadata
from rollout_client.errors import failure_of
from rollout_client.retry import Attempts
from rollout_client.unary_retry import Exchange

_Q = TypeVar("_Q", bound=Message)
_A = TypeVar("_A", bound=Message)


class AsyncCalls:
    """Base class of `AsyncClient`: the connection, its calls with retries, and its end."""

    _channel: AsyncChannel

    async def aclose(self) -> None:
        """Close the client and its connection. Calls in progress raise RuntimeError."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._channel.settings.address or 'on a supplied channel'}>"

    def __reduce__(self) -> NoReturn:
        refuse_pickling(self)

    async def _send(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Q, _A],
        request: _Q,
        timeout: float | None,
        call_metadata: CallMetadata | None,
    ) -> _A:
        settings = self._channel.settings
        exchange: Exchange[_Q, _A] = Exchange(request, Attempts(settings.retry, settings.call_timeout(timeout)))
        return await self._complete(method, exchange, call_metadata)

    async def _complete(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Q, _A],
        exchange: Exchange[_Q, _A],
        call_metadata: CallMetadata | None,
    ) -> _A:
        """Send the requests of an exchange until it is complete, and return the last response. Raises RolloutError."""
        request_id, metadata = self._channel.settings.metadata(call_metadata)
        while True:
            self._channel.check()
            try:
                response = await self._channel.unary(method, exchange.request(), exchange.timeout(), metadata)
            except grpc.RpcError as error:
                failure = failure_of(error, request_id)
            else:
                if exchange.is_complete(response):
                    return response
                continue
            # Closing the client fails its calls. That must raise RuntimeError instead of being retried as a lost connection.
            self._channel.check()
            await self._channel.pause(exchange.on_failure(failure))

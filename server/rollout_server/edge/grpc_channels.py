"""gRPC channels to the endpoints that requests name: one for each, kept for a while."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from rollout_server.edge.rpc.tls import ClientTls, channel_credentials
from rollout_server.edge.targets.resolver import CheckedLookup
from rollout_server.edge.trainer.response_limits import ANSWER_BYTES

_KEPT = 256
LARGEST_ANSWER = ANSWER_BYTES
"""Bytes of one answer, as over HTTP. gRPC's own limit of 4 MiB is less than a long prompt's ids with values beside them."""

_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", LARGEST_ANSWER),
    # Servers that are not told otherwise close connections that ping more often than every 5 minutes while they generate.
    ("grpc.keepalive_time_ms", 330_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
)


@dataclass(slots=True, eq=False)
class _CachedChannel:
    channel: grpc.aio.Channel
    users: int = 0


class Channels:
    """The channels of the process. The least recently used are let go when there are too many; none is closed under a call."""

    def __init__(self, lookup: CheckedLookup, tls: ClientTls) -> None:
        self._lookup = lookup
        self._tls = tls
        self._held: OrderedDict[str, _CachedChannel] = OrderedDict()

    @asynccontextmanager
    async def use(self, url: str) -> AsyncIterator[grpc.aio.Channel]:
        """The channel for `grpc://HOST:PORT` or `grpcs://HOST:PORT`. Raises OSError where the endpoint may not be called.

        One over which nobody could be reached is let go: it holds the addresses that the name had when it was opened.
        """
        held = await self._take(url)
        try:
            await self._close_oldest()
            yield held.channel
        except (grpc.aio.AioRpcError, ConnectionError) as error:
            away = isinstance(error, ConnectionError) or error.code() is grpc.StatusCode.UNAVAILABLE
            if away and self._held.get(url) is held:
                del self._held[url]
            raise
        finally:
            held.users -= 1
            if not held.users and self._held.get(url) is not held:
                await held.channel.close()

    async def close(self) -> None:
        """Closes those that are kept."""
        for held in self._held.values():
            await held.channel.close()
        self._held.clear()

    @staticmethod
    async def connect(channel: grpc.aio.Channel, seconds: float) -> None:
        """Waits until a channel is connected. Raises ConnectionError where it cannot be: then nothing was sent."""
        connectivity = grpc.ChannelConnectivity
        try:
            async with asyncio.timeout(seconds):
                while (state := channel.get_state(try_to_connect=True)) is not connectivity.READY:
                    if state in (connectivity.TRANSIENT_FAILURE, connectivity.SHUTDOWN):
                        raise ConnectionError("no connection came about")
                    await channel.wait_for_state_change(state)
        except TimeoutError:
            raise ConnectionError(f"no connection came about within {seconds:g} s") from None

    async def _take(self, url: str) -> _CachedChannel:
        held = self._held.get(url)
        if held is None:  # others may be as far; a channel that is never used has no connection
            made = _CachedChannel(await self._make(url))
            held = self._held.setdefault(url, made)
        held.users += 1
        self._held.move_to_end(url)
        return held

    async def _close_oldest(self) -> None:
        while len(self._held) > _KEPT:
            _, oldest = self._held.popitem(last=False)
            if not oldest.users:
                await oldest.channel.close()

    async def _make(self, url: str) -> grpc.aio.Channel:
        found = await self._lookup.grpc_target(url)
        options = (*_OPTIONS, *found.options)
        if found.secure:
            credentials = await asyncio.to_thread(
                channel_credentials, self._tls
            )  # which reads the system's certificates
            return grpc.aio.secure_channel(found.target, credentials, options=options)
        return grpc.aio.insecure_channel(found.target, options=options)

"""gRPC channels to the endpoints that requests name: one per URL, cached."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from rollout_server.edge.rpc.tls import ClientTls, channel_credentials
from rollout_server.edge.targets.resolver import CheckedLookup
from rollout_server.edge.tracing.propagation import trace_headers
from rollout_server.edge.trainer.response_limits import ANSWER_BYTES

_KEPT = 256
LARGEST_ANSWER = ANSWER_BYTES
"""Maximum size of one response in bytes, as over HTTP.

gRPC's default of 4 MiB is too small for the ids and logprobs of a long prompt.
"""

_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", LARGEST_ANSWER),
    # 330 s: by default, gRPC servers close connections that send keepalive pings more often than every 5 minutes.
    ("grpc.keepalive_time_ms", 330_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
)


def call_metadata(bearer: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call: the bearer token, unless it is empty, and the trace to which the call belongs."""
    return ((("authorization", f"Bearer {bearer}"),) if bearer else ()) + tuple(trace_headers().items())


@dataclass(slots=True, eq=False)
class _CachedChannel:
    channel: grpc.aio.Channel
    users: int = 0


class Channels:
    """The channels of the process.

    The least recently used channels are evicted when there are too many. A channel is never closed while a call uses it.
    """

    def __init__(self, lookup: CheckedLookup, tls: ClientTls) -> None:
        self._lookup = lookup
        self._tls = tls
        self._held: OrderedDict[str, _CachedChannel] = OrderedDict()

    @asynccontextmanager
    async def use(self, url: str) -> AsyncIterator[grpc.aio.Channel]:
        """Yield the channel for `grpc://HOST:PORT` or `grpcs://HOST:PORT`. Raise OSError if the endpoint may not be called.

        A channel whose endpoint cannot be reached is evicted, because it keeps the addresses that the name had when it was
        opened.
        """
        entry = await self._take(url)
        try:
            await self._close_oldest()
            yield entry.channel
        except (grpc.aio.AioRpcError, ConnectionError) as error:
            away = isinstance(error, ConnectionError) or error.code() is grpc.StatusCode.UNAVAILABLE
            if away and self._held.get(url) is entry:
                del self._held[url]
            raise
        finally:
            entry.users -= 1
            # An evicted channel is closed by its last user.
            if not entry.users and self._held.get(url) is not entry:
                await entry.channel.close()

    async def close(self) -> None:
        """Close all cached channels."""
        for entry in self._held.values():
            await entry.channel.close()
        self._held.clear()

    @staticmethod
    async def connect(channel: grpc.aio.Channel, seconds: float) -> None:
        """Wait until a channel is connected. Raise ConnectionError on failure; nothing was sent then."""
        connectivity = grpc.ChannelConnectivity
        try:
            async with asyncio.timeout(seconds):
                while (state := channel.get_state(try_to_connect=True)) is not connectivity.READY:
                    if state in (connectivity.TRANSIENT_FAILURE, connectivity.SHUTDOWN):
                        raise ConnectionError("the connection failed")
                    await channel.wait_for_state_change(state)
        except TimeoutError:
            raise ConnectionError(f"no connection was established within {seconds:g} s") from None

    async def _take(self, url: str) -> _CachedChannel:
        entry = self._held.get(url)
        if entry is None:  # a concurrent call may win `setdefault`; an unused channel has no connection to close
            made = _CachedChannel(await self._make(url))
            entry = self._held.setdefault(url, made)
        entry.users += 1
        self._held.move_to_end(url)
        return entry

    async def _close_oldest(self) -> None:
        while len(self._held) > _KEPT:
            _, oldest = self._held.popitem(last=False)
            if not oldest.users:
                await oldest.channel.close()

    async def _make(self, url: str) -> grpc.aio.Channel:
        found = await self._lookup.grpc_target(url)
        options = (*_OPTIONS, *found.options)
        if found.secure:
            # In a thread, because it reads certificate files.
            credentials = await asyncio.to_thread(channel_credentials, self._tls)
            return grpc.aio.secure_channel(found.target, credentials, options=options)
        return grpc.aio.insecure_channel(found.target, options=options)

"""gRPC channels to the endpoints that requests name: one for each, kept for a while."""

from __future__ import annotations

from collections import OrderedDict

import grpc

from rollout_server.edge.rpc.tls import ClientTls, channel_credentials
from rollout_server.edge.targets.lookup import CheckedLookup

_KEPT = 256
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
)


class Channels:
    """The channels of the process. The least recently used are closed when there are too many."""

    def __init__(self, lookup: CheckedLookup, tls: ClientTls) -> None:
        self._lookup = lookup
        self._tls = tls
        self._open: OrderedDict[str, grpc.aio.Channel] = OrderedDict()

    async def open(self, url: str) -> grpc.aio.Channel:
        """The channel for `grpc://HOST:PORT` or `grpcs://HOST:PORT`. Raises OSError where the endpoint may not be called."""
        channel = self._open.pop(url, None) or await self._make(url)
        self._open[url] = channel
        while len(self._open) > _KEPT:
            _, oldest = self._open.popitem(last=False)
            await oldest.close()
        return channel

    async def drop(self, url: str) -> None:
        """Closes the channel of an endpoint that failed: it holds the addresses that the name had when it was opened."""
        channel = self._open.pop(url, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        """Closes all of them."""
        for channel in self._open.values():
            await channel.close()
        self._open.clear()

    async def _make(self, url: str) -> grpc.aio.Channel:
        found = await self._lookup.grpc_target(url)
        options = (*_OPTIONS, *found.options)
        if found.secure:
            return grpc.aio.secure_channel(found.target, channel_credentials(self._tls), options=options)
        return grpc.aio.insecure_channel(found.target, options=options)

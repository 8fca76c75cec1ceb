"""gRPC channels to the endpoints that requests name: one for each, kept for a while."""

from __future__ import annotations

from collections import OrderedDict
from urllib.parse import urlsplit

import grpc

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

    def __init__(self) -> None:
        self._open: OrderedDict[str, grpc.aio.Channel] = OrderedDict()

    async def open(self, url: str) -> grpc.aio.Channel:
        """The channel for `grpc://HOST:PORT` or `grpcs://HOST:PORT`. Raises OSError where the endpoint may not be called."""
        channel = self._open.pop(url, None) or _channel(url)
        self._open[url] = channel
        while len(self._open) > _KEPT:
            _, oldest = self._open.popitem(last=False)
            await oldest.close()
        return channel

    async def close(self) -> None:
        """Closes all of them."""
        for channel in self._open.values():
            await channel.close()
        self._open.clear()


def _channel(url: str) -> grpc.aio.Channel:
    parts = urlsplit(url)
    if parts.scheme.lower() == "grpcs":
        return grpc.aio.secure_channel(parts.netloc, grpc.ssl_channel_credentials(), options=_OPTIONS)
    return grpc.aio.insecure_channel(parts.netloc, options=_OPTIONS)

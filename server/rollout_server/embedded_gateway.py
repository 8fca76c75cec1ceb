"""The HTTP gateway inside the server's process: it shares the event loop and calls the server over its Unix socket."""

from __future__ import annotations

from collections.abc import Callable

from rollout_gateway.app import create_app
from rollout_gateway.channel import open_channel
from rollout_gateway.http.serve import HttpListener, Listening
from rollout_gateway.settings import GatewaySettings


class EmbeddedGateway:
    """Listens on the HTTP port and translates requests to gRPC.

    Args:
        target: the server's address, as `open_channel` takes it.
        listening: host, port, certificates and connection limits. Raises ValueError for certificates that cannot be used.
        gateway: the settings of the gateway application.
        metrics: returns this process's metrics for `GET /metrics`.
    """

    def __init__(
        self,
        target: str,
        listening: Listening,
        gateway: GatewaySettings,
        metrics: Callable[[], bytes] | None = None,
    ) -> None:
        self._channel = open_channel(target)
        self._listener = HttpListener(create_app(self._channel, gateway, metrics=metrics), listening)

    async def start(self) -> int:
        """Listen, and return the port. Raises OSError if the port cannot be opened."""
        return await self._listener.start()

    async def stop(self) -> None:
        """Complete open requests within the grace period, then stop."""
        await self._listener.stop()
        await self._channel.close()

"""The HTTP gateway inside the server's process: the same loop, and a channel to the server's Unix socket."""

from __future__ import annotations

from collections.abc import Callable

from rollout_gateway.app import create_app
from rollout_gateway.channel import open_channel
from rollout_gateway.http.serve import HttpListener, Listening
from rollout_gateway.settings import GatewaySettings


class EmbeddedGateway:
    """Listens on the HTTP port and translates to gRPC.

    `target` is an address as `open_channel` takes it; `metrics` gives this process's metrics for `GET /metrics`. Raises
    ValueError where `listening` names certificates that cannot be used.
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
        """Listens and returns the port. Raises OSError where it cannot be had."""
        return await self._listener.start()

    async def stop(self) -> None:
        """Answers what is under way within the grace time, then stops."""
        await self._listener.stop()
        await self._channel.close()

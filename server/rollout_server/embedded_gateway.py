"""The HTTP gateway inside the server's process: it shares the event loop and calls the server directly (D9)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

import grpc
from rollout_gateway.app import create_app
from rollout_gateway.fleet.fleet import Fleet
from rollout_gateway.http.serve import HttpListener, Listening
from rollout_gateway.settings import GatewaySettings

from rollout_server.edge.rpc.local_channel import LocalChannel


class EmbeddedGateway:
    """Listens on the HTTP port and translates requests to gRPC.

    Args:
        target: a channel to the server, or a fleet of servers. The caller closes them.
        listening: host, port, certificates and connection limits. Raises ValueError for certificates that cannot be used.
        gateway: the settings of the gateway application.
        metrics: returns this process's metrics for `GET /metrics`.
        page: makes the page of `GET /metrics` of this process's metrics and those of the gateway; by default they are the page.
    """

    def __init__(
        self,
        target: LocalChannel | grpc.aio.Channel | Fleet,
        listening: Listening,
        gateway: GatewaySettings,
        metrics: Callable[[], bytes],
        page: Callable[[bytes], Awaitable[bytes]] | None = None,
    ) -> None:
        servers = target if isinstance(target, Fleet) else [cast(grpc.aio.Channel, target)]
        app = create_app(servers, gateway, metrics=metrics, page=page)
        self.http_metrics: Callable[[], bytes] = app.state.meters.text
        """Returns the gateway's own metrics, as Prometheus text."""
        self._listener = HttpListener(app, listening)

    async def start(self) -> int:
        """Listen, and return the port. Raises OSError if the port cannot be opened."""
        return await self._listener.start()

    async def stop(self) -> None:
        """Complete open requests within the grace period, then stop."""
        await self._listener.stop()

"""Serves metrics on a separate port, for networks in which monitoring must not reach the callers' port."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from wsgiref.simple_server import WSGIServer

from prometheus_client import start_http_server

from rollout_server.edge.metrics.observer import MetricsObserver


@dataclass(frozen=True, slots=True)
class MetricsPort:
    """An HTTP server in threads, which responds also while the event loop is blocked. It requires no authentication."""

    port: int
    _server: WSGIServer = field(repr=False)
    _thread: threading.Thread = field(repr=False)

    async def stop(self) -> None:
        """Stop the server and close the port."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        await asyncio.to_thread(self._thread.join)


def serve_metrics(metrics: MetricsObserver, port: int, host: str) -> MetricsPort:
    """Start to listen; port 0 selects a free port. Raise OSError if the address is not available."""
    try:
        server, thread = start_http_server(port, host, registry=metrics.families.registry)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host}:{port} for metrics: {error.strerror}") from error
    return MetricsPort(server.server_port, server, thread)

"""Metrics on a port of their own, for networks in which the port for callers is not the one to be read by monitoring."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from wsgiref.simple_server import WSGIServer

from prometheus_client import start_http_server

from rollout_server.edge.metrics.observer import MetricsObserver


@dataclass(frozen=True, slots=True)
class MetricsPort:
    """A server in threads, which answers also while the event loop is busy. It asks nobody who they are."""

    port: int
    _server: WSGIServer = field(repr=False)
    _thread: threading.Thread = field(repr=False)

    async def stop(self) -> None:
        """Answers nothing more, and lets go of the port."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        await asyncio.to_thread(self._thread.join)


def serve_metrics(metrics: MetricsObserver, port: int, host: str) -> MetricsPort:
    """Listens; port 0 is any. Raises OSError where the address cannot be had."""
    try:
        server, thread = start_http_server(port, host, registry=metrics.families.registry)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host}:{port} for metrics: {error.strerror}") from error
    return MetricsPort(server.server_port, server, thread)

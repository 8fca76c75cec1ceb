"""Metrics on a separate port, over real sockets."""

from __future__ import annotations

import asyncio
import socket
import urllib.error
import urllib.request

import pytest
from rollout_server.edge.metrics.observer import CONTENT_TYPE, MetricsObserver
from rollout_server.edge.metrics.server import serve_metrics

from tests.edge.metrics.counted import Exposed


def fetch(port: int, path: str = "/metrics") -> tuple[str, str]:
    """Content type and text."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as response:
        return response.headers["content-type"], response.read().decode()


def test_the_port_shows_what_was_counted_and_lets_go_in_the_end() -> None:
    async def play() -> None:
        metrics = MetricsObserver()
        served = serve_metrics(metrics, 0, "127.0.0.1")
        metrics.families.resampled.inc(3)
        kind, text = await asyncio.to_thread(fetch, served.port)
        assert kind == CONTENT_TYPE
        assert Exposed(text).value("rollout_resampled_total") == 3
        await served.stop()
        with pytest.raises(urllib.error.URLError):
            await asyncio.to_thread(fetch, served.port)
        with socket.create_server(("127.0.0.1", served.port)):
            pass

    asyncio.run(play())


def test_servers_show_their_own_metrics() -> None:
    async def play() -> None:
        first, second = MetricsObserver(), MetricsObserver()
        first.families.resampled.inc()
        ports = [serve_metrics(metrics, 0, "127.0.0.1") for metrics in (first, second)]
        shown = [Exposed((await asyncio.to_thread(fetch, port.port))[1]) for port in ports]
        assert [each.value("rollout_resampled_total") for each in shown] == [1, 0]
        for port in ports:
            await port.stop()

    asyncio.run(play())


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port} for metrics"):
            serve_metrics(MetricsObserver(), port, "127.0.0.1")

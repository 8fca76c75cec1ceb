"""The httpx clients of functions repeat calls that an overloaded server refuses, and no others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from rollout_server.agent.http_clients import http_client


class Refusing(BaseHTTPRequestHandler):
    """Answers with the statuses of its server, in order."""

    def do_POST(self) -> None:
        """Answer a call."""
        server: Any = self.server
        body = self.rfile.read(int(self.headers["content-length"]))
        server.calls.append((self.path, self.headers["authorization"], body))
        self.send_response(server.statuses.pop(0))
        self.send_header("retry-after", "0")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def refusing() -> Iterator[Any]:
    """A real HTTP server with `statuses` to answer, and its `calls`."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    server.statuses, server.calls = [], []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("statuses", "status"),
    [([200], 200), ([503, 200], 200), ([429, 504, 200], 200), ([504, 503, 502], 502), ([500], 500), ([410], 410)],
)
async def test_repeated(refusing: Any, statuses: list[int], status: int, is_async: bool) -> None:
    refusing.statuses = [*statuses, 200]
    client = http_client(f"http://127.0.0.1:{refusing.server_port}/r/u/v1", "rk_u", is_async=is_async)
    if isinstance(client, httpx.AsyncClient):
        async with client:
            response = await client.post("chat/completions", json={"a": 1})
    else:
        with client:
            response = client.post("chat/completions", json={"a": 1})
    assert response.status_code == status
    assert refusing.calls == [("/r/u/v1/chat/completions", "Bearer rk_u", b'{"a":1}')] * len(statuses)

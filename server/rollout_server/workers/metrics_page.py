"""One page of metrics over all workers, in Prometheus' text format."""

from __future__ import annotations

import asyncio
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

_HEADERS: Final = (b"# HELP ", b"# TYPE ")
_UP: Final = "rollout_worker_up"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def merged_page(pages: Mapping[int, bytes | None]) -> bytes:
    """Return the samples of all workers, each with the label `worker`, and which workers responded (None: it did not)."""
    families: dict[bytes, tuple[list[bytes], list[bytes]]] = {}
    for index, page in pages.items():
        _add(families, page or b"", b'worker="%d"' % index)
    lines = [
        f"# HELP {_UP} 1 if the worker has responded within a second; 0: its samples are missing.".encode(),
        f"# TYPE {_UP} gauge".encode(),
        *(f'{_UP}{{worker="{index}"}} {int(page is not None)}'.encode() for index, page in pages.items()),
    ]
    for headers, samples in families.values():
        lines += headers
        lines += samples
    return b"\n".join(lines) + b"\n"


def _add(families: dict[bytes, tuple[list[bytes], list[bytes]]], page: bytes, label: bytes) -> None:
    """Add the lines of one worker to their families, whose headers all workers share."""
    headers: list[bytes] = []
    samples: list[bytes] = []
    for line in page.split(b"\n"):
        if line.startswith(_HEADERS):
            kind, name = line.split(b" ", 3)[1:3]
            if kind == b"HELP":
                headers, samples = families.setdefault(name, ([], []))
            if not any(each.startswith(b"# %s %s " % (kind, name)) for each in headers):
                headers.append(line)
        elif line:
            samples.append(_labelled(line, label))


def _labelled(sample: bytes, label: bytes) -> bytes:
    name, brace, rest = sample.partition(b"{")
    if brace and b" " not in name:
        return b"%s{%s,%s" % (name, label, rest)
    name, _, value = sample.partition(b" ")
    return b"%s{%s} %s" % (name, label, value)


class SharedMetricsPort:
    """An HTTP server in threads that returns one page and requires no authentication. All workers share its port.

    Raises OSError if the address is not available.
    """

    def __init__(self, host: str, port: int, page: Callable[[], bytes]) -> None:
        def respond(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
            found = environ["PATH_INFO"] in ("/", "/metrics")
            start_response("200 OK" if found else "404 Not Found", [("Content-Type", CONTENT_TYPE)])
            return [page() if found else b""]

        self._server = make_server(host, port, respond, _server_class(host), _QuietHandler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Stop the server and close the port."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()


def _server_class(host: str) -> type[WSGIServer]:
    class SharedWsgiServer(socketserver.ThreadingMixIn, WSGIServer):
        daemon_threads = True
        allow_reuse_port = True
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    return SharedWsgiServer


class _QuietHandler(WSGIRequestHandler):
    timeout = 30.0

    def log_message(self, format: str, *args: Any) -> None:
        """Without a line per request."""

"""Questions between workers, over private Unix sockets: a line with the question, then the answer until the connection closes.

Threads answer them, so a worker whose event loop is blocked is still seen in the metrics.
"""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

METRICS: Final = b"metrics"
STREAMS: Final = b"streams"
_SECONDS: Final = 1.0
"""How long a worker may take to answer."""
_CHUNK: Final = 1 << 16

Response = Callable[[], bytes]


class QuestionSocket:
    """Answers questions within its block."""

    def __init__(self, path: Path, responses: Mapping[bytes, Response]) -> None:
        path.unlink(missing_ok=True)  # of a process that was killed

        class Handler(socketserver.StreamRequestHandler):
            timeout = _SECONDS

            def handle(self) -> None:
                with suppress(OSError):  # the other worker has gone
                    response = responses.get(self.rfile.readline(100).strip())
                    self.wfile.write(b"" if response is None else response())

        self._server = _QuestionServer(str(path), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="questions", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _QuestionServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Without socketserver's traceback on standard error: the asking worker reports that there was no answer."""


def query(paths: Sequence[Path], question: bytes) -> dict[int, bytes | None]:
    """Ask all workers at once. Return their responses by index, None for a worker that does not answer in time."""
    with ThreadPoolExecutor(len(paths)) as pool:
        return dict(enumerate(pool.map(lambda path: _response(path, question), paths)))


def _response(path: Path, question: bytes) -> bytes | None:
    ends = time.monotonic() + _SECONDS
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_SECONDS)
            connection.connect(str(path))
            connection.sendall(question + b"\n")
            response = bytearray()
            while part := connection.recv(_CHUNK):
                response += part
                connection.settimeout(max(0.001, ends - time.monotonic()))
    except OSError:
        return None
    return bytes(response) or None

"""One HTTP connection, with the limits that uvicorn leaves to whoever stands before it.

httptools takes heads of any size, and uvicorn waits for them, and for bodies that nobody reads, as long as it takes. Here a
head is bounded in bytes, fields and time, a request line in bytes, a body in time. What is over a limit is answered and the
connection closed. The time of a body that is being read is kept by `RequestBoundary`, which can answer in the shape of the
route; this one catches what is left.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from starlette.responses import JSONResponse
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Of two of these, a proxy before this port may have believed the other one.
_ONCE: Final = (b"host", b"authorization")
# Answered also when too many connections are open: who restarts a server because it is busy loses its work.
_PROBES: Final = frozenset({b"/health", b"/healthz", b"/readyz"})
_LEAVING_SECONDS: Final = 2.0
_SLACK_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What a client may take of a port. A connection counts from its handshake to its end, whatever it does."""

    #: Requests on more connections than these are answered with 503.
    connections: int = 10_000
    #: Longer request lines are answered with 414.
    url_bytes: int = 16 * 1024
    #: More header fields, or more bytes of them, are answered with 431.
    fields: int = 100
    field_bytes: int = 64 * 1024
    #: From the first byte of a request, or the beginning of the connection, to the last one of its head; then 408.
    head_seconds: float = 20.0
    #: How long a body may arrive; the application answers with 408, so this is for bodies that it does not read.
    body_seconds: float = 60.0
    #: Longer than clients keep theirs: a request into a connection that is being closed is lost.
    idle_seconds: int = 75


class _ConnectionRefused(Exception):
    """Stops the parser."""


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits; these are methods that asyncio and httptools call.

    A connection that comes about while the listener is `stopping` is closed: uvicorn would wait for its end.
    """

    def __init__(self, *args: Any, limits: ConnectionLimits, stopping: Callable[[], bool], **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._stopping = stopping
        self._timer: asyncio.TimerHandle | None = None
        self._began = False
        self._in_body = False
        self._leaving = False
        self._fields = self._field_bytes = 0
        # What was fed since the parser last reported something: it gathers a field until it is whole.
        self._unreported = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Begins to wait for the first request."""
        super().connection_made(transport)
        if self._stopping():
            self._leaving = True
            transport.close()
            return
        self._wait(self._limits.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the timer."""
        self._wait(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feeds the parser."""
        if self._leaving:
            return
        self._unreported += len(data)
        super().data_received(data)
        if self._unreported > self._limits.field_bytes:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif self._timer is None and not self._is_responding():
            # Line breaks between requests, which end uvicorn's own wait.
            self._wait(self._limits.head_seconds)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._began, self._in_body = True, False
        self._unreported = self._fields = self._field_bytes = 0
        self._wait(self._limits.head_seconds)

    def on_url(self, url: bytes) -> None:
        """A piece of the request line."""
        super().on_url(url)
        self._unreported = 0
        if len(self.url) > self._limits.url_bytes:
            self._stop(HTTPStatus.REQUEST_URI_TOO_LONG)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head, or of the trailer of a chunked body."""
        self._unreported = 0
        self._fields += 1
        self._field_bytes += len(name) + len(value)
        if self._fields > self._limits.fields or self._field_bytes > self._limits.field_bytes:
            self._stop(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        # A trailer is counted and dropped: added late, its fields would pass for fields of the head.
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole: the application is called."""
        if reason := _fault(self.parser.get_http_version(), self.headers):
            self._stop(HTTPStatus.BAD_REQUEST, reason)
        self._unreported, self._in_body = 0, True
        self._wait(self._limits.body_seconds + _SLACK_SECONDS)
        crowded = len(self.connections) > self._limits.connections and self.url.partition(b"?")[0] not in _PROBES
        self.app = _CROWDED if crowded else self.config.loaded_app
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._unreported = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._unreported, self._began = 0, False
        self._wait(None)
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn does about a parser that has stopped."""
        self._refuse(HTTPStatus.BAD_REQUEST)

    def _unsupported_upgrade_warning(self) -> None:
        """Says nothing: clients offer HTTP/2 in passing, and go on with HTTP/1.1."""

    def _stop(self, status: HTTPStatus, reason: str = "") -> None:
        self._refuse(status, reason)
        raise _ConnectionRefused

    def _wait(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._too_slow)

    def _is_responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _too_slow(self) -> None:
        self._timer = None
        if self.pipeline or (self._is_responding() and not self._in_body):
            # Sent ahead of an answer, for which uvicorn stops to read.
            self._wait(self._limits.head_seconds)
        elif self._began and not self._in_body:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT)
        else:
            self.transport.close()

    def _refuse(self, status: HTTPStatus, reason: str = "") -> None:
        """Answers, unless that would break into another answer, and leaves."""
        if self._leaving or self.transport.is_closing():
            return
        self._leaving = True
        if self._is_responding():
            self.transport.close()
            return
        content = json.dumps({"detail": reason or status.phrase})
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
        self.transport.write(f"{head}\r\nconnection: close\r\n\r\n{content}".encode())
        # Closed at once, what the client still sends would be answered with a reset, which takes the answer away from it.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LEAVING_SECONDS, self.transport.close)


def _fault(version: str, headers: list[tuple[bytes, bytes]]) -> str:
    """What no request may have; empty for a good one."""
    if version not in ("1.0", "1.1"):
        return f"HTTP/{version} is not supported: send HTTP/1.1"
    counts = Counter(name for name, _ in headers)
    for name in _ONCE:
        if counts[name] > 1:
            return f"The header {name.decode().title()} was sent more than once"
    return "The header Host is missing" if version == "1.1" and not counts[b"host"] else ""


_CROWDED: Final = JSONResponse(
    {"detail": "Too many connections are open: try again later"}, 503, {"retry-after": "1", "connection": "close"}
)

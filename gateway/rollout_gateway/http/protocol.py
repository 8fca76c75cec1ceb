"""One HTTP connection, with the limits that uvicorn leaves to a reverse proxy.

httptools accepts heads of any size. uvicorn waits without limit for a head, and for a body that the application does not read.
This protocol limits a head in bytes, fields and time, a request line in bytes, and a body in time. A request over a limit
gets an error response, and the connection closes. `RequestBoundary` limits the time of bodies that are read, because it can
respond in the route's error shape; the limit here catches the other bodies.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import httptools
from starlette.responses import JSONResponse
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

# Refused if sent twice: a proxy in front of this port may have used the other value.
_ONCE: Final = (b"host", b"authorization")
# Probes are served even if too many connections are open. Otherwise an orchestrator restarts a busy server and loses its work.
_PROBES: Final = frozenset({b"/health", b"/healthz", b"/readyz"})
# Requests that may wait for the responses before theirs. With more, the connection closes: they are held in memory.
_MAX_WAITING: Final = 16
_LEAVING_SECONDS: Final = 2.0
_SLACK_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of one port and its connections. A connection counts from its handshake to its end, also while idle."""

    #: Requests on connections beyond this number get 503.
    connections: int = 10_000
    #: Longer request targets get 414.
    url_bytes: int = 16 * 1024
    #: More header fields, or more bytes of them, get 431.
    fields: int = 100
    field_bytes: int = 64 * 1024
    #: Time from the first byte of a request, or from the start of the connection, to the end of the head; then 408.
    head_seconds: float = 20.0
    #: Time for a body to arrive. The application sends 408 itself, so this limit is for bodies that it does not read.
    body_seconds: float = 60.0
    #: Longer than HTTP clients keep idle connections, because a request on a connection that is being closed is lost.
    idle_seconds: int = 75


class _ConnectionRefused(Exception):
    """Raised in a parser callback to stop the parser."""


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits. asyncio and httptools call its methods.

    A connection that opens while the listener is `stopping` is closed at once, because uvicorn would wait for its end.
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
        # Requests without a complete response. uvicorn's `cycle` is the latest, which may wait for others.
        self._open: list[RequestResponseCycle] = []
        # Bytes fed since the parser's last callback: httptools buffers a field until it is complete.
        self._unreported = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Start the timer for the first request."""
        super().connection_made(transport)
        if self._stopping():
            self._leaving = True
            transport.close()
            return
        self._wait(self._limits.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer, and tell the application that the client has left."""
        self._wait(None)
        for cycle in self._open:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, and limit how much it buffers."""
        if self._leaving:
            return
        self._unreported += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            # Does nothing if `_stop` caused the error, because it has responded already.
            self._refuse(HTTPStatus.BAD_REQUEST)
        if self._unreported > self._limits.field_bytes:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif self._timer is None and not self._is_responding():
            # Line breaks between requests stop uvicorn's keep-alive timer without starting a request.
            self._wait(self._limits.head_seconds)

    def on_message_begin(self) -> None:
        """Reset the counters and the timer for a new request."""
        super().on_message_begin()
        self._began, self._in_body = True, False
        self._unreported = self._fields = self._field_bytes = 0
        self._wait(self._limits.head_seconds)

    def on_url(self, url: bytes) -> None:
        """Count a piece of the request target."""
        super().on_url(url)
        self._unreported = 0
        if len(self.url) > self._limits.url_bytes:
            self._stop(HTTPStatus.REQUEST_URI_TOO_LONG)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a field of the head, or of the trailer of a chunked body."""
        self._unreported = 0
        self._fields += 1
        self._field_bytes += len(name) + len(value)
        if self._fields > self._limits.fields or self._field_bytes > self._limits.field_bytes:
            self._stop(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        # Trailer fields are counted and dropped: uvicorn would add them to the fields of the head.
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check the complete head and call the application."""
        if self._is_offer():
            return
        if reason := _fault(self.parser.get_http_version(), self.headers):
            self._stop(HTTPStatus.BAD_REQUEST, reason)
        self._unreported, self._in_body = 0, True
        self._wait(self._limits.body_seconds + _SLACK_SECONDS)
        crowded = len(self.connections) > self._limits.connections and self.url.partition(b"?")[0] not in _PROBES
        self.app = _CROWDED if crowded else self.config.loaded_app
        super().on_headers_complete()
        self._open = [*(cycle for cycle in self._open if not cycle.response_complete), self.cycle]
        if len(self.pipeline) > _MAX_WAITING:
            self._stop(HTTPStatus.TOO_MANY_REQUESTS)
        if self.pipeline:
            # uvicorn has paused reading, and would not notice that the client leaves.
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """Pass on a piece of the body."""
        self._unreported = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the timer: the request is complete."""
        if self._is_offer():
            return
        self._unreported, self._began = 0, False
        self._wait(None)
        super().on_message_complete()

    def _parse(self, data: bytes) -> None:
        """Feed the parser. Raises HttpParserError.

        A request that offers another protocol is read as any other (RFC 9110, 7.8). Clients routinely offer HTTP/2. httptools
        would take the body for the other protocol, so the head is parsed again without the offer.
        """
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if not self._is_offer():
                    return
                line = self.parser.get_method(), self.url, self.parser.get_http_version().encode()
                fields = [b"%s: %s\r\n" % field for field in self.headers if field[0] != b"upgrade"]
                data = b"%s %s HTTP/%s\r\n%s\r\n" % (*line, b"".join(fields)) + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                # As in uvicorn: requests behind one that asks to close the connection must not cost its response.
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            else:
                return

    def _is_offer(self) -> bool:
        """Whether the parsed head has an offer of another protocol. A CONNECT has none: what follows it is no body."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _stop(self, status: HTTPStatus, reason: str = "") -> None:
        self._refuse(status, reason)
        raise _ConnectionRefused

    def _wait(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._too_slow)

    def _is_responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _owes_another(self) -> bool:
        """Whether a response has begun, or is due before that to the request whose body is being read."""
        in_body, earlier = self._began and self._in_body, self._open[:-1]
        return not in_body or self.cycle.response_started or not all(each.response_complete for each in earlier)

    def _too_slow(self) -> None:
        self._timer = None
        if self.pipeline or (self._is_responding() and not self._in_body):
            # Pipelined behind a running response, during which uvicorn pauses reading a body. The client is not too slow.
            self._wait(self._limits.head_seconds)
        elif self._began and not self._in_body:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT)
        else:
            self.transport.close()

    def _refuse(self, status: HTTPStatus, reason: str = "") -> None:
        """Send an error response and close. Only close if it would be taken for another response, or for part of one."""
        if self._leaving or self.transport.is_closing():
            return
        self._leaving = True
        if self._is_responding():
            if self._owes_another():
                self.transport.close()
                return
            # The application drops a request whose client has left.
            self.cycle.disconnected, self.cycle.waiting_for_100_continue = True, False
            self.cycle.message_event.set()
        content = json.dumps({"detail": reason or status.phrase})
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
        self.transport.write(f"{head}\r\nconnection: close\r\n\r\n{content}".encode())
        # Half-close first: after a full close, further data from the client causes a reset, which can discard the response.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LEAVING_SECONDS, self.transport.close)


def _fault(version: str, headers: list[tuple[bytes, bytes]]) -> str:
    """Return what is wrong with a head; empty if it is valid."""
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

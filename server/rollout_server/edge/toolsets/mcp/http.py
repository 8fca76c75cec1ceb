"""HTTP for the SDK's client: connections to checked addresses only, bounded responses, and failures as JSON-RPC errors.

An exception of an HTTP request would end the SDK's session with all its calls. So this transport answers a request that failed
with a response of its own: a JSON-RPC error that contains the reason. The SDK gives it to the call that made the request.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any, Final

import httpcore2
import httpx2
from mcp_types import CONNECTION_CLOSED

from rollout_server.core.message import MAX_VALUES, has_more_values
from rollout_server.edge.targets.resolver import CheckedLookup
from rollout_server.edge.targets.rules import TargetRefused
from rollout_server.edge.toolsets.mcp.messages import TOO_MANY_VALUES

_CONNECT_SECONDS: Final = 10.0
_SILENT_SECONDS: Final = 3600.0
"""How long a server may send nothing while a call runs. Cancelled calls whose server never answers hold a connection so long."""
_BRIEF_SECONDS: Final = 5.0
"""How long a server may take to accept a notification, and to end a session."""
_RESUME_SECONDS: Final = 1.0
"""Wait before a response that broke off is resumed. The server chooses the SDK's wait, which may be none."""
_CONNECT_RETRIES: Final = 3
"""Attempts to connect after the first: the request was certainly not processed. They take 1.5 s."""
_CONNECTIONS: Final = 1000
_LONGEST_PLACE: Final = 200
"""Characters of the target of a redirect that an error quotes."""
_NOTIFICATION: Final = b'{"jsonrpc":"2.0","method":"notifications/'
_SESSION: Final = "mcp-session-id"


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of a connection. `response_bytes`: of one response with its headers; `tls`: verifies https servers."""

    response_bytes: int
    tls: ssl.SSLContext


class ResponseFlood(Exception):
    """A response is larger than the limit."""


class _CountedStream(httpcore2.AsyncNetworkStream):
    """A connection that counts the bytes that were read since the last write: one response, with all its headers and chunks."""

    def __init__(self, stream: httpcore2.AsyncNetworkStream, limit: int) -> None:
        self._stream = stream
        self._limit = limit
        self._read = 0

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 - httpcore's signature
        data = await self._stream.read(max_bytes, timeout)
        self._read += len(data)
        if self._read > self._limit:
            raise ResponseFlood(f"its response has more than {self._limit:,} bytes")
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        self._read = 0
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> httpcore2.AsyncNetworkStream:
        return _CountedStream(await self._stream.start_tls(ssl_context, server_hostname, timeout), self._limit)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class CheckedBackend(httpcore2.AnyIOBackend):
    """Opens connections. With a `lookup`, only to addresses that it returns, which the target rules allow.

    The name stays in the Host header and in the check of the certificate.
    """

    def __init__(self, lookup: CheckedLookup | None, limit: int) -> None:
        self._lookup = lookup
        self._limit = limit

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's signature
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Open a connection. Raise `TargetRefused`, or httpcore's errors."""
        addresses = [host]
        if self._lookup is not None:
            try:
                addresses = [str(address) for address in await self._lookup.addresses(host, port)]
            except TargetRefused:
                raise
            except OSError as error:
                raise httpcore2.ConnectError(f"its name has no address ({type(error).__name__})") from None
        failure: Exception = httpcore2.ConnectError("its name has no address")
        for address in addresses:
            try:
                stream = await super().connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
            else:
                return _CountedStream(stream, self._limit)
        raise failure


class _Body(httpx2.AsyncByteStream):
    """The body of a response that is still being read."""

    def __init__(self, transport: McpHttpTransport, response: httpcore2.Response) -> None:
        self._transport = transport
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._response.aiter_stream():
                yield chunk
        except ResponseFlood as error:
            self._transport.flood = str(error)
            raise

    async def aclose(self) -> None:
        await self._response.aclose()


class McpHttpTransport(httpx2.AsyncBaseTransport):
    """Sends the requests of one session.

    `flood`: why a response was given up, for people; `lost`: why the session cannot be used further. Both are empty at first.
    """

    def __init__(self, limits: HttpLimits, lookup: CheckedLookup | None) -> None:
        self.flood = self.lost = ""
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=limits.tls,
            max_connections=_CONNECTIONS,
            keepalive_expiry=0.5,  # shorter than the limit of any server: a request into a closing connection is lost
            retries=_CONNECT_RETRIES,
            network_backend=CheckedBackend(lookup, limits.response_bytes),
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self._pool.aclose()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request. Never raises but for a cancellation."""
        if request.method == "GET":
            # A stream of notifications, which would be dropped; or the rest of a response that broke off.
            if self.flood or "last-event-id" not in request.headers:
                return httpx2.Response(405)
            await asyncio.sleep(_RESUME_SECONDS)
        is_brief = request.method == "DELETE" or request.content.startswith(_NOTIFICATION)
        try:
            async with asyncio.timeout(_BRIEF_SECONDS if is_brief else None):
                return await self._send(request)
        except Exception as error:
            return _failure(_reason(error))

    async def _send(self, request: httpx2.Request) -> httpx2.Response:
        url = request.url
        response = await self._pool.handle_async_request(
            httpcore2.Request(
                request.method,
                httpcore2.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
                headers=request.headers.raw,
                content=request.content,
                extensions=request.extensions,
            )
        )
        headers = httpx2.Headers(response.headers)
        streamed = response.status == 200 and headers.get("content-type", "").lower().startswith("text/event-stream")
        handed_on = False
        try:
            if headers.get("content-encoding", "identity").lower() != "identity":
                return _failure("its response is compressed, which was not asked for")
            if streamed:
                handed_on = True
                return httpx2.Response(response.status, headers=headers, stream=_Body(self, response))
            content = await response.aread()
        finally:
            if not handed_on:
                await response.aclose()
        if response.status == 404 and _SESSION in request.headers:
            self.lost = "it no longer knows the session: it restarted, or ended the session"
        if has_more_values(content, MAX_VALUES):
            return _failure(TOO_MANY_VALUES)
        if 300 <= response.status < 400:
            place = headers.get("location", "")[:_LONGEST_PLACE]
            return _failure(f"it responded with a redirect to {place or 'nowhere'}, which is not followed")
        if response.status >= 400 and not _is_error(content):
            return _failure(f"it responded with HTTP status {response.status}", response.status)
        return httpx2.Response(response.status, headers=headers, content=content)


def http_client(transport: McpHttpTransport, headers: dict[str, str]) -> httpx2.AsyncClient:
    """Return a client without proxies, netrc, cookies of other sessions and compression."""
    timeout = httpx2.Timeout(connect=_CONNECT_SECONDS, read=_SILENT_SECONDS, write=60.0, pool=None)
    return httpx2.AsyncClient(
        transport=transport,
        headers={"accept-encoding": "identity", "user-agent": "rollout-server", **headers},
        timeout=timeout,
        trust_env=False,
        max_redirects=1,
    )


def _failure(text: str, status: int = 502) -> httpx2.Response:
    error = {"jsonrpc": "2.0", "id": None, "error": {"code": CONNECTION_CLOSED, "message": text}}
    return httpx2.Response(status, json=error)


def _is_error(content: bytes) -> bool:
    """Return whether a body is a JSON-RPC error."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(body, dict) and isinstance(body.get("error"), dict)


def _reason(error: Exception) -> str:
    match error:
        case ResponseFlood() | TargetRefused():
            return str(error)
        case httpcore2.ConnectError() | httpcore2.ConnectTimeout():
            return f"it could not be reached ({error or type(error).__name__})"
        case TimeoutError() | httpcore2.TimeoutException():
            return "it did not respond in time"
    return f"the connection broke before its response was complete ({type(error).__name__})"

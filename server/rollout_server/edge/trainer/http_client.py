"""The HTTP client of the process. All trainers and engines share it."""

from __future__ import annotations

import asyncio
import email.utils
import re
import ssl
import time
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
from aiohttp.abc import AbstractResolver
from aiohttp.http_exceptions import ContentEncodingError
from yarl import URL

from rollout_server.edge.targets.host_port import url_host
from rollout_server.edge.targets.resolver import refusal_of
from rollout_server.edge.tracing.conventions import ATTEMPT_FAILED
from rollout_server.edge.tracing.propagation import add_event, trace_headers
from rollout_server.edge.trainer.response_limits import ANSWER_BYTES
from rollout_server.runtime.ports import CompletionRequest

_INFORMATIONAL = 16
"""Maximum number of 1xx responses before the final one."""
_SECONDS = re.compile(r"[0-9]+(\.[0-9]+)?")
"""Seconds in Retry-After. The standard has whole ones only, but a server that sends 0.5 means half a second."""


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Settings of the HTTP client.

    Args:
        timeout: seconds for one completion.
        connections: maximum number of open connections; further requests wait for one.
        keepalive: seconds that an idle connection stays open. It must be shorter than the server's own limit (uvicorn: 5): a
            request sent into a connection that the server is closing is lost, and cannot be repeated safely.
        connect_attempts: attempts to connect for requests that may not be repeated otherwise.
        max_answer_bytes: maximum size of a response body.
        resolver: resolves host names; None: the system's resolver.
        tls: TLS context for https targets; None: the system's certificates.
        quotes_strangers: error messages quote the response of a target that has not yet answered in this rollout. Turn this off
            if callers are not trusted: a caller could name any internal service as the trainer, and read its responses.
    """

    timeout: float = 300.0
    connections: int = 10_000
    keepalive: float = 0.5
    connect_attempts: int = 3
    max_answer_bytes: int = ANSWER_BYTES
    resolver: AbstractResolver | None = None
    tls: ssl.SSLContext | None = None
    quotes_strangers: bool = True


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A POST request. `timeout` in seconds; None: use the settings. `is_known`: the target has answered before in this rollout."""

    url: str
    body: bytes = field(repr=False)
    headers: dict[str, str] = field(repr=False)
    timeout: float | None = None
    is_known: bool = False

    @property
    def host(self) -> str:
        """Host and port for messages. The rest of the URL may contain secrets."""
        parsed = URL(self.url, encoded=True)
        # Not `host`, which decodes punycode and raises UnicodeError where it is malformed.
        return f"{url_host(parsed.raw_host or '')}:{parsed.port}"


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A complete response. `retry_after` is in seconds, and only set for a 429 or 503 that refuses the request."""

    status: int
    body: bytes
    retry_after: float | None = None
    replayed_key: str = ""
    content_type: str = ""
    may_be_quoted: bool = True

    @property
    def quotable(self) -> bytes:
        """The part of the body that error messages may quote."""
        return self.body if self.may_be_quoted else b""


class ConnectionRefused(Exception):
    """No connection was established, so the request was not processed and may be repeated. The text is for people."""


class ConnectionLost(Exception):
    """The request may have been processed, but no complete response was received. The text is for people."""

    def __init__(self, text: str, *, timeout: bool = False) -> None:
        super().__init__(text)
        self.timeout = timeout


class TargetForbidden(Exception):
    """The server's rules forbid the target's address. The text is for people."""


class ResponseTooLarge(Exception):
    """The response exceeds the size limit. The text is for people."""


class _Endless(aiohttp.ClientError):
    """The server sends informational (1xx) responses without end."""


class _Response(aiohttp.ClientResponse):
    """Limit the number of informational (1xx) responses.

    aiohttp accepts any number, and reads those in its buffer without yielding to the event loop.
    """

    async def start(self, connection: aiohttp.connector.Connection) -> Self:
        protocol, taken = connection.protocol, 0
        if protocol is None:
            raise aiohttp.ServerDisconnectedError
        read = protocol.read

        async def counted() -> Any:
            nonlocal taken
            taken += 1
            if taken > _INFORMATIONAL + 1:
                raise _Endless
            return await read()

        protocol.read = counted  # type: ignore[method-assign]
        try:
            await super().start(connection)
        finally:
            del protocol.read
        return self


class HttpClient:
    """POST JSON with aiohttp, whose connection pool stays fast with thousands of concurrent requests.

    The exceptions distinguish a connection that was never established from one that broke, because only the first may be
    repeated freely.
    """

    def __init__(self, settings: HttpSettings) -> None:
        self.settings = settings
        self._session: aiohttp.ClientSession | None = None

    async def post(self, request: HttpRequest) -> HttpResponse:
        """POST once, as a part of the current span. Raises `ConnectionRefused`, `ConnectionLost`, `ResponseTooLarge` or
        `TargetForbidden`.
        """
        try:
            response = await self._classified(request)
        except Exception as error:
            add_event(ATTEMPT_FAILED, {"error.type": type(error).__name__})
            raise
        if not 200 <= response.status < 300:
            add_event(ATTEMPT_FAILED, {"http.response.status_code": response.status})
        return response

    async def _classified(self, request: HttpRequest) -> HttpResponse:
        try:
            return await self._post(request)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, UnicodeError) as error:
            refusal = refusal_of(error)
            if refusal is not None:
                raise TargetForbidden(str(refusal)) from error
            raise ConnectionRefused(f"could not be reached ({type(error).__name__})") from error
        except TimeoutError as error:
            seconds = request.timeout or self.settings.timeout
            raise ConnectionLost(f"no response within {seconds:g} s", timeout=True) from error
        except _Endless as error:
            raise ResponseTooLarge(
                f"the target sent more than {_INFORMATIONAL} informational responses and no final one"
            ) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ConnectionLost(_fault_of_response(error)) from error

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _post(self, request: HttpRequest) -> HttpResponse:
        session = self._open()
        # Yield to the event loop twice, so that it notices pooled connections that the other side closed while it was busy.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        # The URL was checked in this exact form; encoding it again could change the target.
        url = URL(request.url, encoded=True)
        headers = {**request.headers, **trace_headers()}
        async with session.post(
            url, data=request.body, headers=headers, allow_redirects=False, timeout=self._timeout(request)
        ) as response:
            chunks: list[bytes] = []
            size = 0
            async for chunk in response.content.iter_any():
                size += len(chunk)
                if size > self.settings.max_answer_bytes:
                    raise ResponseTooLarge(f"the response is larger than {self.settings.max_answer_bytes} bytes")
                chunks.append(chunk)
            key = response.headers.get("idempotency-key", "")
            quoted = request.is_known or self.settings.quotes_strangers
            kind = response.headers.get("content-type", "").partition(";")[0]
            return HttpResponse(response.status, b"".join(chunks), _retry_after(response), key, kind, quoted)

    def _timeout(self, request: HttpRequest) -> aiohttp.ClientTimeout:
        seconds = request.timeout or self.settings.timeout
        return aiohttp.ClientTimeout(total=seconds, sock_connect=min(10.0, seconds))

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            settings = self.settings
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=settings.connections,
                    keepalive_timeout=settings.keepalive,
                    ttl_dns_cache=30,
                    resolver=settings.resolver,
                    ssl=settings.tls or True,
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                response_class=_Response,
                skip_auto_headers=("user-agent",),
            )
        return self._session


def _fault_of_response(error: Exception) -> str:
    """Describe a response that could not be read. aiohttp's own text is not used, because it may quote the response."""
    if isinstance(error.__cause__, ContentEncodingError):
        return "the response's body is not in its Content-Encoding"
    if isinstance(error, aiohttp.ClientResponseError):
        return (
            "the response is not valid HTTP (such as an invalid header, or two Content-Length headers), or it has a "
            "Content-Encoding that the request does not accept"
        )
    return f"the response was incomplete ({type(error).__name__})"


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    """Return the Retry-After of a 429 or 503 in seconds; None if it is missing or the status is another one."""
    if response.status not in (429, 503):
        return None
    text = response.headers.get("retry-after", "").strip()
    if _SECONDS.fullmatch(text):
        return float(text[:9])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


def turn_headers(request: CompletionRequest) -> dict[str, str]:
    """Return the headers of a completion request: the same Idempotency-Key for all attempts of a turn (D8)."""
    return keyed_headers(request.asked.turn_key, request.credentials.completions)


def keyed_headers(key: str, credential: str) -> dict[str, str]:
    """Return the headers of a request that may be repeated under its key; no Authorization if the credential is empty."""
    headers = {"content-type": "application/json", "idempotency-key": key}
    if credential:
        headers["authorization"] = f"Bearer {credential}"
    return headers

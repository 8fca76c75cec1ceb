"""The one HTTP client of the process."""

from __future__ import annotations

import asyncio
import email.utils
import ssl
import time
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from rollout_server.edge.targets.resolver import refusal_of
from rollout_server.edge.trainer.response_limits import ANSWER_BYTES
from rollout_server.runtime.ports import CompletionRequest

_INFORMATIONAL = 16
"""Responses of status 1xx that may come before the one that counts."""


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """How trainers are called.

    Args:
        timeout: seconds for one completion.
        connections: open at the same time; more requests wait for one.
        keepalive: seconds that an idle connection is kept. Less than any trainer keeps it (uvicorn: 5), because a request
            sent into a connection that is being closed can neither be answered nor safely repeated.
        connect_attempts: how often a connection that is refused is tried, where nothing else may be repeated.
        max_answer_bytes: the largest answer that is read.
        resolver: how names become addresses; None: as the system does it.
        tls: how https trainers are known; None: by the system's certificates.
        quotes_strangers: error messages quote what a target answers that has not answered this rollout before. Turned off
            where callers are unknown: they could name any service of the network as their trainer, and read its answers.
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
    """What is posted. `timeout` in seconds; None: that of the settings. `is_known`: the target has answered before."""

    url: str
    body: bytes = field(repr=False)
    headers: dict[str, str] = field(repr=False)
    timeout: float | None = None
    is_known: bool = False

    @property
    def host(self) -> str:
        """Host and port, for messages. The rest of a URL is nobody's business."""
        parsed = URL(self.url, encoded=True)
        return f"{parsed.host}:{parsed.port}"


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """What came back. `retry_after` is in seconds, where a 429 or 503 says that the request was not taken."""

    status: int
    body: bytes
    retry_after: float | None = None
    replayed_key: str = ""
    content_type: str = ""
    may_be_quoted: bool = True

    @property
    def quotable(self) -> bytes:
        """What of the body error messages may quote."""
        return self.body if self.may_be_quoted else b""


class ConnectionRefused(Exception):
    """No connection came about, so the request was not taken and may be repeated. The text is for a person."""


class ConnectionLost(Exception):
    """The request may have been taken, but no whole answer came. The text is for a person."""

    def __init__(self, text: str, *, timeout: bool = False) -> None:
        super().__init__(text)
        self.timeout = timeout


class TargetForbidden(Exception):
    """This server's rules do not allow the address. The text is for a person."""


class ResponseTooLarge(Exception):
    """The answer is larger than what is read. The text is for a person."""


class _Endless(aiohttp.ClientError):
    """Informational responses come and come."""


class _Response(aiohttp.ClientResponse):
    """Takes few informational responses. aiohttp takes any number, and without a pause while there are some in its buffer."""

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
    """Posts JSON over aiohttp, whose pool does not slow down with the number of requests under way.

    Its own exceptions tell a connection that never came about from one that broke, which decides what may be repeated.
    """

    def __init__(self, settings: HttpSettings) -> None:
        self.settings = settings
        self._session: aiohttp.ClientSession | None = None

    async def post(self, request: HttpRequest) -> HttpResponse:
        """Posts once. Raises `ConnectionRefused`, `ConnectionLost`, `ResponseTooLarge` or `TargetForbidden`."""
        try:
            return await self._post(request)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, UnicodeError) as error:
            refusal = refusal_of(error)
            if refusal is not None:
                raise TargetForbidden(str(refusal)) from error
            raise ConnectionRefused(f"could not be reached ({type(error).__name__})") from error
        except TimeoutError as error:
            seconds = request.timeout or self.settings.timeout
            raise ConnectionLost(f"no answer came within {seconds:g} s", timeout=True) from error
        except _Endless as error:
            raise ResponseTooLarge(
                f"more than {_INFORMATIONAL} informational responses came instead of an answer"
            ) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ConnectionLost(f"the answer did not arrive whole ({type(error).__name__})") from error

    async def close(self) -> None:
        """Closes all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _post(self, request: HttpRequest) -> HttpResponse:
        session = self._open()
        # Two rounds of the event loop, in which it takes note of pooled connections that were closed while it was busy.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        # The URL was checked as it stands; encoding it again could make another one of it.
        url = URL(request.url, encoded=True)
        async with session.post(
            url, data=request.body, headers=request.headers, allow_redirects=False, timeout=self._timeout(request)
        ) as response:
            chunks: list[bytes] = []
            size = 0
            async for chunk in response.content.iter_any():
                size += len(chunk)
                if size > self.settings.max_answer_bytes:
                    raise ResponseTooLarge(f"the answer is larger than {self.settings.max_answer_bytes} bytes")
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


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    """Seconds to wait before asking again, where the trainer says that it did not take the request."""
    if response.status not in (429, 503):
        return None
    text = response.headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


def turn_headers(request: CompletionRequest) -> dict[str, str]:
    """Of a completion: the same key on each attempt of a turn (D8)."""
    return keyed_headers(request.asked.turn_key, request.credentials.completions)


def keyed_headers(key: str, credential: str) -> dict[str, str]:
    """Of a request that may be repeated under its key; no Authorization where the credential is empty."""
    headers = {"content-type": "application/json", "idempotency-key": key}
    if credential:
        headers["authorization"] = f"Bearer {credential}"
    return headers

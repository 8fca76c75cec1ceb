"""The one HTTP client of the process."""

from __future__ import annotations

import asyncio
import email.utils
import time
from dataclasses import dataclass, field

import aiohttp
from yarl import URL

from rollout_server.core.outcome import Category, Failure
from rollout_server.runtime.port import Failed

TRAINER_TEXT = 500
"""How much of a trainer's own words goes into an error message."""


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """How trainers are called.

    Args:
        timeout: seconds for one completion.
        connections: open at the same time; more requests wait for one.
        keepalive: seconds that an idle connection is kept. Less than any trainer keeps it (uvicorn: 5), because a request
            sent into a connection that is being closed can neither be answered nor safely repeated.
        connect_attempts: how often a connection that is refused is tried.
        max_answer_bytes: the largest answer that is read.
    """

    timeout: float = 300.0
    connections: int = 10_000
    keepalive: float = 0.5
    connect_attempts: int = 3
    max_answer_bytes: int = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """What is posted, for which turn, and until when (monotonic seconds) it may be repeated."""

    url: str
    body: bytes
    headers: dict[str, str] = field(repr=False)
    turn: int
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """What came back, and how many requests it took."""

    status: int
    body: bytes
    attempts: int
    retry_after: float | None = None


class HttpClient:
    """Posts JSON over aiohttp, whose pool does not slow down with the number of requests under way.

    Its own exceptions tell a connection that never came about from one that broke, which decides what may be repeated.
    """

    def __init__(self, settings: HttpSettings) -> None:
        self.settings = settings
        self._session: aiohttp.ClientSession | None = None

    async def post(self, request: HttpRequest) -> HttpAnswer:
        """Posts once; again only where the request provably was not taken: no connection, or 429 or 503 with Retry-After.

        Raises `Failed` with NETWORK or TIMEOUT.
        """
        attempts = refusals = 0
        while True:
            attempts += 1
            try:
                answer = await self._post(request, attempts)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                refusals += 1
                if refusals >= self.settings.connect_attempts:
                    raise Failed(_unreachable(error, request, refusals)) from error
                await asyncio.sleep(0.1 * 2**refusals)
                continue
            except TimeoutError as error:
                raise Failed(_timeout(request, self.settings.timeout)) from error
            except UnicodeError as error:  # a host that cannot be a name
                raise Failed(_unreachable(error, request, attempts)) from error
            except (aiohttp.ClientError, OSError, ValueError) as error:
                raise Failed(_broken(error, request)) from error
            wait = answer.retry_after
            if wait is None or (request.deadline is not None and time.monotonic() + wait >= request.deadline):
                return answer
            await asyncio.sleep(max(wait, min(1.0, 0.05 * 2**attempts)))

    async def close(self) -> None:
        """Closes all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _post(self, request: HttpRequest, attempts: int) -> HttpAnswer:
        session = self._open()
        # Two rounds of the event loop, in which it takes note of pooled connections that were closed while it was busy.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        # The URL was checked as it stands; encoding it again could make another one of it.
        url = URL(request.url, encoded=True)
        async with session.post(url, data=request.body, headers=request.headers, allow_redirects=False) as response:
            chunks: list[bytes] = []
            size = 0
            async for chunk in response.content.iter_any():
                size += len(chunk)
                if size > self.settings.max_answer_bytes:
                    raise Failed(_too_large(request, self.settings.max_answer_bytes))
                chunks.append(chunk)
            return HttpAnswer(response.status, b"".join(chunks), attempts, _retry_after(response))

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            settings = self.settings
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=settings.connections, keepalive_timeout=settings.keepalive, ttl_dns_cache=30
                ),
                timeout=aiohttp.ClientTimeout(total=settings.timeout, sock_connect=min(10.0, settings.timeout)),
                cookie_jar=aiohttp.DummyCookieJar(),
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


def _host(url: str) -> str:
    parsed = URL(url, encoded=True)
    return f"{parsed.host}:{parsed.port}"


def _unreachable(error: Exception, request: HttpRequest, attempts: int) -> Failure:
    text = (
        f"turn {request.turn}: the trainer at {_host(request.url)} could not be reached in {attempts} attempts "
        f"({type(error).__name__}); is it running, and does server_url name its host and port?"
    )
    return Failure(Category.NETWORK, text, request.turn)


def _timeout(request: HttpRequest, seconds: float) -> Failure:
    text = (
        f"turn {request.turn}: timeout: the trainer did not answer within {seconds:g} s (HTTP_CLIENT_TIMEOUT). "
        "The turn may have been generated, so it is not asked for again"
    )
    return Failure(Category.TIMEOUT, text, request.turn)


def _broken(error: Exception, request: HttpRequest) -> Failure:
    text = (
        f"turn {request.turn}: the answer of the trainer at {_host(request.url)} did not arrive whole "
        f"({type(error).__name__}). The turn may have been generated, so it is not asked for again"
    )
    return Failure(Category.NETWORK, text, request.turn)


def _too_large(request: HttpRequest, limit: int) -> Failure:
    text = f"turn {request.turn}: the answer of the trainer at {_host(request.url)} is larger than {limit} bytes"
    return Failure(Category.VALIDATION, text, request.turn)

"""The HTTP clients of functions that own their loop. As the official SDKs do, they repeat calls that a busy server refuses."""

from __future__ import annotations

import asyncio
import ssl
import time
from functools import cache
from typing import Final

import httpx

_TIMEOUT: Final = 600.0
_ATTEMPTS: Final = 3
_REPEATED: Final = frozenset({429, 502, 503, 504})
_LONGEST_WAIT: Final = 8.0


@cache
def tls_context() -> ssl.SSLContext:
    """Return the TLS context that all clients share: to load the certificates for each one would block the event loop for 40 ms."""
    return httpx.create_ssl_context()


def retry_seconds(response: httpx.Response, attempt: int) -> float | None:
    """Return how long to wait before the call is repeated; None if it is not repeated."""
    if response.status_code not in _REPEATED or attempt >= _ATTEMPTS:
        return None
    after = response.headers.get("retry-after", "")
    return min(float(after) if after.isdecimal() else 0.5 * 2**attempt, _LONGEST_WAIT)


class RetryingTransport(httpx.HTTPTransport):
    """Repeats calls in a thread."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, up to three times."""
        attempt, response = 1, super().handle_request(request)
        while (seconds := retry_seconds(response, attempt)) is not None:
            response.close()
            time.sleep(seconds)
            attempt, response = attempt + 1, super().handle_request(request)
        return response


class AsyncRetryingTransport(httpx.AsyncHTTPTransport):
    """Repeats calls on the event loop."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, up to three times."""
        attempt, response = 1, await super().handle_async_request(request)
        while (seconds := retry_seconds(response, attempt)) is not None:
            await response.aclose()
            await asyncio.sleep(seconds)
            attempt, response = attempt + 1, await super().handle_async_request(request)
        return response


def http_client(base_url: str, key: str, *, is_async: bool) -> httpx.Client | httpx.AsyncClient:
    """Return a client for paths below the base URL."""
    headers = {"authorization": f"Bearer {key}"}
    if is_async:
        transport = AsyncRetryingTransport(verify=tls_context())
        return httpx.AsyncClient(base_url=base_url, headers=headers, timeout=_TIMEOUT, transport=transport)
    return httpx.Client(
        base_url=base_url, headers=headers, timeout=_TIMEOUT, transport=RetryingTransport(verify=tls_context())
    )

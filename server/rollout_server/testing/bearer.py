"""The key that a trainer demands of its callers."""

import hmac
from typing import Final

from starlette.requests import Request


class Bearer:
    """``Authorization: Bearer KEY``, on every callback; with None everybody is admitted."""

    REFUSAL: Final = "Invalid or missing API key"

    def __init__(self, api_key: str | None) -> None:
        self._wanted = None if api_key is None else f"Bearer {api_key}".encode()

    def admits(self, request: Request) -> bool:
        """Whether the request brings the key. Compared in constant time."""
        given = request.headers.get("authorization", "")
        return self._wanted is None or hmac.compare_digest(given.encode(), self._wanted)

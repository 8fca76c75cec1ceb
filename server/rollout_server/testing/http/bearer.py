"""The key that a trainer demands of its callers."""

import contextlib
import hmac
from typing import Final

from starlette.requests import Request


class Bearer:
    """``Authorization: Bearer KEY``, on every callback; with None everybody is admitted."""

    REFUSAL: Final = "Invalid or missing API key"

    def __init__(self, api_key: str | None) -> None:
        self._wanted = None if api_key is None else _forms(f"Bearer {api_key}")

    def admits(self, request: Request) -> bool:
        """Whether the request brings the key, in UTF-8 or in Latin-1: clients differ. Compared in constant time."""
        if self._wanted is None:
            return True
        given = request.headers.get("authorization", "").encode("latin-1")  # as it came
        return any(hmac.compare_digest(given, wanted) for wanted in self._wanted)


def _forms(text: str) -> tuple[bytes, ...]:
    forms = [text.encode()]
    with contextlib.suppress(UnicodeEncodeError):
        forms.append(text.encode("latin-1"))
    return tuple(forms)

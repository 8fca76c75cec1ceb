"""What a trainer said instead of an answer, without the secrets it may repeat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from urllib.parse import quote

from rollout_server.core.outcome import Category, Failure

TRAINER_TEXT = 500
"""How much of a trainer's own words goes into an error message."""

_LOOKED_AT = 256 * 1024


def refused(status: int, body: bytes, turn: int, secrets: Sequence[str]) -> Failure:
    """The failure of a turn that was answered with another status than 200."""
    text = redacted(body, secrets)
    said = f": {text}" if text else ""
    if status == 429:
        category = Category.RATE_LIMITED
    elif status >= 500:
        category = Category.TRAINER_SERVER
    elif status >= 400:
        category = Category.TRAINER_CLIENT
    else:
        category = Category.VALIDATION
        said = "; only 200 is an answer, and redirects are not followed"
    return Failure(category, f"turn {turn}: the trainer answered {status}{said}", turn, status)


def redacted(body: bytes, secrets: Sequence[str]) -> str:
    """The beginning of a text without the secrets that it may repeat, escaped or cut off."""
    window = body[:_LOOKED_AT].decode("utf-8", "replace")
    # The longest first: one secret may be a part of another.
    for secret in sorted(secrets, key=len, reverse=True):
        for form in {secret, json.dumps(secret)[1:-1], quote(secret), quote(secret, safe="")}:
            window = window.replace(form, "[redacted]")
    if secrets and len(body) > _LOOKED_AT:  # its end may be a part of one
        window = window[: -6 * max(map(len, secrets))]
    return window.strip()[:TRAINER_TEXT]

"""API keys of a server."""

from __future__ import annotations

import hmac
import secrets

API_KEY_PREFIX = "osm_rollout_"


def generate_api_key() -> str:
    """A key that nobody guesses."""
    return f"{API_KEY_PREFIX}{secrets.token_urlsafe(32)}"


def validate_api_key(provided_key: str | None, expected_key: str) -> bool:
    """Whether the keys are the same, in a time that tells nothing about them."""
    if not provided_key:
        return False
    return hmac.compare_digest(provided_key.encode("utf-8", "replace"), expected_key.encode("utf-8", "replace"))

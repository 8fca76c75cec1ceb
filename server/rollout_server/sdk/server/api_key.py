"""Creation and comparison of API keys."""

from __future__ import annotations

import hmac
import secrets

API_KEY_PREFIX = "osm_rollout_"


def generate_api_key() -> str:
    """Return a new API key with 256 random bits."""
    return f"{API_KEY_PREFIX}{secrets.token_urlsafe(32)}"


def validate_api_key(provided_key: str | None, expected_key: str) -> bool:
    """Return whether the keys are equal, in constant time."""
    if not provided_key:
        return False
    return hmac.compare_digest(provided_key.encode("utf-8", "replace"), expected_key.encode("utf-8", "replace"))

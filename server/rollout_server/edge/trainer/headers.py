"""Headers of the requests to trainers."""

from __future__ import annotations

from rollout_server.runtime.ports import CompletionRequest


def turn_headers(ask: CompletionRequest) -> dict[str, str]:
    """Of a completion: the same key on each attempt of a turn (D8)."""
    return keyed_headers(ask.asked.turn_key, ask.credentials.completions)


def keyed_headers(key: str, credential: str) -> dict[str, str]:
    """Of a request that may be repeated under its key; no Authorization where the credential is empty."""
    headers = {"content-type": "application/json", "idempotency-key": key}
    if credential:
        headers["authorization"] = f"Bearer {credential}"
    return headers

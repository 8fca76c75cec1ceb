"""What a server without keys says of itself in the log."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from rollout_server.assembly import keyring, tell_of_doors
from rollout_server.settings import Settings


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "no API key is set: whoever reaches 0.0.0.0 may start rollouts"),
        ({"host": "::"}, "no API key is set: whoever reaches :: may start rollouts"),
        ({"host": "127.0.0.1"}, ""),
        ({"tls_client_ca": "clients.pem"}, ""),
        ({"api_key": "long-enough-to-be-a-key", "synchronous_needs_key": True}, ""),
    ],
)
def test_whoever_may_start_rollouts_is_told(caplog: pytest.LogCaptureFixture, given: dict[str, Any], told: str) -> None:
    settings = Settings.model_construct(**given)
    with caplog.at_level(logging.WARNING, "rollout_server.assembly"):
        tell_of_doors(settings, keyring(Settings(_env_file=None, **{"api_key": given.get("api_key")})))
    assert caplog.text.count("WARNING") == bool(told)
    assert told in caplog.text

"""Keys of model endpoints: each is good for its own rollout, in its own process."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_server.edge.model_keys import ModelKeys

UID = "0a1b2c3d4e-00112233445566778899"


def test_a_key_names_its_rollout() -> None:
    keys = ModelKeys()
    key = keys.key(UID)
    assert re.fullmatch(rf"rk_{UID}\.[A-Za-z0-9_-]{{43}}", key)  # 256 bits
    assert keys.uid_of(key) == UID
    assert keys.key(UID) == key


def test_a_key_is_worth_nothing_elsewhere() -> None:
    key = ModelKeys().key(UID)
    assert ModelKeys().uid_of(key) is None
    keys = ModelKeys(b"s" * 32)
    assert keys.uid_of(keys.key("other").replace("other", UID)) is None
    assert repr(keys).count("s" * 32) == 0


@pytest.mark.parametrize(
    "key", ["", "rk_", "rk_.", f"rk_{UID}", f"rk_{UID}.", UID, "rk_\N{BULLET}.a", "rk_" + "a" * 10**6]
)
def test_what_is_no_key_opens_nothing(key: str) -> None:
    assert ModelKeys().uid_of(key) is None


@given(st.integers(0, 10**6), st.characters(codec="utf-8"))
def test_no_changed_key_is_valid(at: int, char: str) -> None:
    keys = ModelKeys(b"s" * 32)
    key = keys.key(UID)
    at %= len(key)
    changed = key[:at] + char + key[at + 1 :]
    assert keys.uid_of(changed) == (UID if changed == key else None)


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="5 bytes; it needs at least 32"):
        ModelKeys(b"short")

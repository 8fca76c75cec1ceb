"""2,500 random inputs; `make hostile` sends 100,000."""

from __future__ import annotations

import os

import pytest

from tests.hostile.fuzz import fuzz

INPUTS = int(os.environ.get("HOSTILE_INPUTS", "2500"))
SEED = int(os.environ.get("HOSTILE_SEED", "1"))


@pytest.mark.timeout(900)
async def test_no_input_is_a_fault_of_the_server() -> None:
    found = await fuzz(INPUTS, SEED)
    # The fuzzer must reach the code behind validation: rollouts are started, and inputs of each kind are refused.
    assert {
        "body 200",
        "body 202",
        "body 201",
        "body 401",
        "body 422",
        "rpc OK",
        "rpc INVALID_ARGUMENT",
        "bytes 400",
    } <= found.keys()

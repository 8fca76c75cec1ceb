"""The simulator itself: a seed always gives the same world, and what is wrong in the server is found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from rollout_server.core.conversation import State

from tests.simulator.coverage import KINDS, missing
from tests.simulator.faults import Fault
from tests.simulator.planted import PLANTED, planted
from tests.simulator.runner import digest, failure_text, run_seed

ROOT = Path(__file__).resolve().parents[2]
FOUND_WITHIN = 500
_DIGESTS = "from tests.simulator.runner import *\nprint(*(digest(run_seed(seed)) for seed in range(20)))"


def test_a_seed_gives_the_same_world_in_any_process() -> None:
    here = [digest(run_seed(seed)) for seed in range(20)]
    assert [digest(run_seed(seed)) for seed in range(20)] == here
    assert len({*here}) == 20
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", _DIGESTS]
        printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        assert printed.stdout.split() == here


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_its_seed_shows_it_again(name: str) -> None:
    _, law = PLANTED[name]
    with planted(name):
        for seed in range(FOUND_WITHIN):
            world = run_seed(seed)
            if any(law in text for text in world.laws.broken):
                break
        else:
            pytest.fail(f"not found within {FOUND_WITHIN} seeds: {name}")
        assert digest(run_seed(seed)) == digest(world)
    assert f"python -m tests.simulator --seed {seed}" in failure_text({seed: world.laws.broken})
    assert not run_seed(seed).laws.broken


def test_what_was_never_reached_is_named() -> None:
    nothing = [*missing(Counter(), Counter())]
    assert "Asked in state OPEN was never reached" in nothing
    assert "never happened: server: crash" in nothing
    everything = Counter({(state, kind): 1 for state in State for kind in KINDS})
    assert "Asked in state ENDED was unexpectedly reached" in missing(everything, Counter(Fault))

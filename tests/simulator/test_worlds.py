"""2,000 seeds: no world breaks a law, and each part of them reaches every state, record and fault. `make simulate` runs more."""

from __future__ import annotations

import pytest

from tests.simulator.coverage import missing, table
from tests.simulator.runner import failure_text, run_seeds

PARTS = 8
SEEDS = 2000


@pytest.mark.parametrize("part", range(PARTS))
def test_no_world_breaks_a_law_and_everything_is_reached(part: int) -> None:
    size = SEEDS // PARTS
    report = run_seeds(range(part * size, (part + 1) * size))
    assert not report.broken, failure_text(report.broken)
    assert [*missing(report.cells, report.faults)] == [], table(report.cells, report.faults)

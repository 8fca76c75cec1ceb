"""What all suites share: random examples that may take their time, and a table at the end that says what each suite took."""

from __future__ import annotations

import gc
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How fast a machine is at the moment is no fault of what is tested.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_collection_finish() -> None:
    """What was imported stays: the collector need not look through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Seconds and tests of each folder of `tests/`, set-up and tear-down included."""
    seconds: dict[str, float] = defaultdict(float)
    tests: dict[str, int] = defaultdict(int)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                place = Path(report.nodeid.partition("::")[0])
                suite = place.parts[1] if len(place.parts) > 2 else place.stem
                seconds[suite] += report.duration
                tests[suite] += report.when == "call"
    if len(seconds) > 1:
        terminalreporter.write_sep("=", "suites")
        for suite in sorted(seconds, key=lambda name: -seconds[name]):
            terminalreporter.write_line(f"{suite:32} {tests[suite]:5} tests {seconds[suite]:7.1f} s")

"""Recorded ratios to the floor, which `make bench-quick` compares with.

A ratio hardly depends on the machine. The cheapest round of each program counts, because other load can only add to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from bench.judge.result import Result, Row

_FACTOR = 2.0
"""By how much a ratio may be off before the check fails."""
Ratios = dict[str, dict[str, float]]


def record(result: Result, file: Path) -> None:
    """Write the ratios of a result, by workload and API."""
    ratios: Ratios = {}
    for row in result.rows:
        ratios.setdefault(row.workload, {})[row.api] = round(_ratio(row), 1)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(ratios), indent=1) + b"\n")


def off(result: Result, file: Path) -> Iterator[tuple[Row, str]]:
    """Yield the rows whose ratio is more than twice the recorded one, each with a text. Rows without a record are skipped."""
    recorded = msgspec.json.decode(file.read_bytes(), type=Ratios)
    for row in result.rows:
        before, now = recorded.get(row.workload, {}).get(row.api), _ratio(row)
        if before is not None and now > _FACTOR * before:
            yield row, f"{row.title}, {row.api}: {now:.1f} times the floor, recorded are {before:.1f} ({file})"


def _ratio(row: Row) -> float:
    return row.server.cpu_ms_low / row.floor.cpu_ms_low

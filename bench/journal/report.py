"""Tables of the journal's benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table

from bench.journal.recovery import Recovery
from bench.journal.turns import CpuResult, DiskSync, LatencyResult, percentile_ms

CPU_TARGET = 150.0
"""Target for the CPU that the journal adds to a turn, in microseconds."""
LATENCY_TARGET = 5.0
"""Target for the median latency that the journal adds to a turn, in milliseconds."""
RECOVERY_TARGET = 10.0
"""Target for the seconds until a restarted server takes requests."""


@dataclass(frozen=True, slots=True)
class Figures:
    """All results."""

    sync: DiskSync
    cpu: Sequence[CpuResult]
    latency: Sequence[LatencyResult]
    recovery: Recovery


def tables(figures: Figures) -> Iterator[Table]:
    """Yield the tables."""
    yield _cpu(figures)
    yield _latency(figures)
    yield _written(figures.latency)
    yield _recovery(figures.recovery)


def _cpu(figures: Figures) -> Table:
    title = "CPU of a turn, microseconds, with all threads of the process; cheapest round"
    caption = f"a write of 4 KB with fsync takes {figures.sync.cpu_us:.0f} microseconds of CPU here"
    table = _table(
        title, caption, "rollouts", "memory", "SQLite", "added", "turns/s memory", "turns/s SQLite", "target"
    )
    for each in figures.cpu:
        table.add_row(
            str(each.workload),
            f"{each.memory.least_us:.0f}",
            f"{each.sqlite.least_us:.0f}",
            f"{each.added_us:.0f}",
            f"{max(each.memory.rates):,.0f}",
            f"{max(each.sqlite.rates):,.0f}",
            _target(each.added_us, CPU_TARGET, "us"),
        )
    return table


def _latency(figures: Figures) -> Table:
    title = "Time from run.sample() to its reply without that of the sampler, milliseconds, at most 200 turns/s"
    caption = f"a write of 4 KB with fsync takes {figures.sync.median_ms:.2f} ms here (99th percentile {figures.sync.p99_ms:.2f})"
    headings = "memory median", "p99", "SQLite median", "p99", "added median", "p99", "target"
    table = _table(title, caption, "rollouts", *headings)
    for each in figures.latency:
        values = [percentile_ms(seconds, part) for seconds in (each.memory, each.sqlite) for part in (50, 99)]
        values += [each.added_ms(50), each.added_ms(99)]
        cells = [f"{value:.2f}" for value in values]
        table.add_row(str(each.workload), *cells, _target(each.added_ms(50), LATENCY_TARGET, "ms"))
    return table


def _written(results: Sequence[LatencyResult]) -> Table:
    title = "What the journal writes for a turn in the runs of the latency"
    caption = "with a share of the start and the end of the rollout; disk: with SQLite's log, indexes and checkpoints"
    table = _table(title, caption, "rollouts", "commits", "rows", "bytes of values", "bytes on disk")
    for each in results:
        written, turns = each.written, each.written.turns
        table.add_row(
            str(each.workload),
            f"{written.commits / turns:.2f}",
            f"{written.rows / turns:.2f}",
            f"{written.payload / turns:,.0f}",
            f"{written.disk / turns:,.0f}",
        )
    return table


def _recovery(result: Recovery) -> Table:
    title = f"Restart with {result.finished:,} finished and {result.unfinished:,} unfinished rollouts of {result.turns} turns"
    caption = "memory: peak, of which without a journal; then the unfinished rollouts run to their end"
    headings = "open", "load", "restore", "sum", "target", "resume", "journal", "memory"
    table = _table(title, caption, *headings)
    table.add_row(
        f"{result.open_seconds:.2f} s",
        f"{result.load_seconds:.2f} s",
        f"{result.restore_seconds:.2f} s",
        f"{result.seconds:.2f} s",
        _target(result.seconds, RECOVERY_TARGET, "s"),
        f"{result.resume_seconds:.2f} s",
        f"{result.disk_bytes / 1e6:.0f} MB",
        f"{result.peak_bytes / 1e6:.0f} MB ({result.idle_bytes / 1e6:.0f})",
    )
    return table


def _target(value: float, target: float, unit: str) -> str:
    return f"{'meets' if value <= target else 'MISSES'} {target:g} {unit}"


def _table(title: str, caption: str, *headings: str) -> Table:
    table = Table(title=title, caption=caption)
    for at, heading in enumerate(headings):
        table.add_column(heading, justify="right" if at else "left")
    return table

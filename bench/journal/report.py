"""The results of the journal's benchmark as Markdown, as docs/durability.md has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import fill

from bench.journal.recovery import Recovery
from bench.journal.turns import CpuResult, DiskSync, LatencyResult

CPU_TARGET = 150.0
"""Target for the CPU that the journal adds to a turn, in microseconds."""
LATENCY_TARGET = 5.0
"""Target for the median latency that the journal adds to a turn, in milliseconds."""
RECOVERY_TARGET = 10.0
"""Target for the seconds until a restarted server takes requests."""

_HEADINGS = (
    "rollouts at once",
    "CPU of a turn in memory",
    "added by the journal",
    "added latency: median",
    "99th percentile",
    "commits per turn",
    "bytes on disk per turn",
)


@dataclass(frozen=True, slots=True)
class Figures:
    """All results."""

    sync: DiskSync
    cpu: Sequence[CpuResult]
    latency: Sequence[LatencyResult]
    recovery: Recovery


def markdown(figures: Figures) -> str:
    """Return the figures as two paragraphs with a table in between."""
    return "\n".join([_disk(figures.sync), "", *_table(figures), "", _restart(figures.recovery)])


def missed(figures: Figures) -> Iterator[str]:
    """Yield the targets that were missed, each with its figure."""
    for cpu in figures.cpu:
        if cpu.added_us > CPU_TARGET:
            yield f"{cpu.workload} at once: {cpu.added_us:.0f} us of CPU added to a turn, more than {CPU_TARGET:g}"
    for latency in figures.latency:
        if latency.added_ms(50) > LATENCY_TARGET:
            yield f"{latency.workload} at once: {latency.added_ms(50):.1f} ms added in the median, more than {LATENCY_TARGET:g}"
    if figures.recovery.seconds > RECOVERY_TARGET:
        yield f"a restart takes {figures.recovery.seconds:.1f} s, more than {RECOVERY_TARGET:g}"


def _disk(sync: DiskSync) -> str:
    return _paragraph(
        f"An `fsync` of 4 KB took {sync.median_ms:.1f} ms (99th percentile {sync.p99_ms:.1f} ms)",
        f"and {sync.cpu_us:.0f} microseconds of CPU. Each commit has one.",
    )


def _table(figures: Figures) -> Iterator[str]:
    yield _row(_HEADINGS)
    yield _row(["---", *["---:"] * (len(_HEADINGS) - 1)]).replace(" ", "")
    latencies = {str(each.workload): each for each in figures.latency}
    for cpu in figures.cpu:
        cells = [str(cpu.workload), f"{cpu.memory.least_us:,.0f} us", f"{cpu.added_us:,.0f} us"]
        yield _row([*cells, *_latency(latencies.get(str(cpu.workload)))])


def _latency(result: LatencyResult | None) -> Sequence[str]:
    if result is None:
        return [""] * 4
    written = result.written
    return (
        f"{result.added_ms(50):.1f} ms",
        f"{result.added_ms(99):.0f} ms",
        f"{written.commits / written.turns:.2f}",
        f"{written.disk / written.turns / 1000:.0f} KB",
    )


def _restart(result: Recovery) -> str:
    added = result.peak_bytes - result.idle_bytes
    return _paragraph(
        f"A restart with {result.finished:,} finished and {result.unfinished:,} unfinished rollouts of {result.turns} turns",
        f"({result.disk_bytes / 1e6:.0f} MB) took {result.seconds:.1f} s until the server took requests:",
        f"{result.open_seconds:.1f} s to open the database, {result.load_seconds:.1f} s to read it and",
        f"{result.restore_seconds:.1f} s to rebuild the rollouts. The process had {result.peak_bytes / 1e6:.0f} MB at its peak,",
        f"{added / 1e6:.0f} MB more than without a journal.",
    )


def _paragraph(*parts: str) -> str:
    return fill(" ".join(parts), width=132)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"

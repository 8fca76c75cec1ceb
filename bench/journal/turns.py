"""Cost of a turn with the SQLite journal and with the memory journal: CPU, added latency, and what is written."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from rollout_server.edge.journal import SqliteJournal
from rollout_server.edge.journal.database import Database
from rollout_server.runtime.journal import Change, Journal, MemoryJournal

from bench.journal.workload import Site, Workload

_PAGE = 4096
_TURNS_PER_SECOND = 200.0
"""Load of the latency runs. The event loop is mostly idle then, so that turns do not wait for each other."""
_SHORTEST_GENERATION = 0.01


@dataclass(frozen=True, slots=True)
class DiskSync:
    """A write of 4096 bytes with fsync: median and 99th percentile in milliseconds, and CPU in microseconds."""

    median_ms: float
    p99_ms: float
    cpu_us: float


@dataclass(slots=True)
class Costs:
    """CPU of a turn in microseconds and turns per second, one value per round."""

    cpu_us: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    @property
    def least_us(self) -> float:
        """CPU of the cheapest round: other load on the machine can only add to it."""
        return min(self.cpu_us)


@dataclass(frozen=True, slots=True)
class CpuResult:
    """Cost of a turn of a workload with each journal."""

    workload: Workload
    memory: Costs
    sqlite: Costs

    @property
    def added_us(self) -> float:
        """What the SQLite journal adds to a turn, in microseconds of CPU."""
        return self.sqlite.least_us - self.memory.least_us


@dataclass(slots=True)
class Written:
    """What was written for a number of turns. `disk` has the bytes that reached the disk."""

    turns: int = 0
    commits: int = 0
    disk: int = 0


@dataclass(frozen=True, slots=True)
class LatencyResult:
    """What the server adds to the time of a completion with each journal, in seconds per turn, and what SQLite wrote."""

    workload: Workload
    memory: Sequence[float]
    sqlite: Sequence[float]
    written: Written

    def added_ms(self, percent: int) -> float:
        """Return the difference of a percentile in milliseconds."""
        return percentile_ms(self.sqlite, percent) - percentile_ms(self.memory, percent)


def percentile_ms(seconds: Sequence[float], percent: int) -> float:
    """Return a percentile from 1 to 99 in milliseconds."""
    return 1000 * statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1]


def sync_disk(directory: Path, times: int) -> DiskSync:
    """Measure appending 4096 bytes and fsync, the floor of a durable commit."""
    seconds, page = [], bytes(_PAGE)
    with TemporaryDirectory(dir=directory) as found:
        file = os.open(Path(found) / "file", os.O_CREAT | os.O_WRONLY)
        try:
            began_cpu = time.process_time()
            for _ in range(times):
                began = time.perf_counter()
                os.write(file, page)
                os.fsync(file)
                seconds.append(time.perf_counter() - began)
            cpu = time.process_time() - began_cpu
        finally:
            os.close(file)
    return DiskSync(percentile_ms(seconds, 50), percentile_ms(seconds, 99), 1e6 * cpu / times)


async def measure_cpu(workload: Workload, directory: Path, rounds: int) -> CpuResult:
    """Run the rounds of a workload with each journal in turn, so that other load affects both alike.

    The sampler returns at once and the agent does not pause, so the rounds are as fast as the machine allows. Finished rollouts
    are deleted once as many have finished after them as run at once.
    """
    result = CpuResult(workload, Costs(), Costs())
    async with _sqlite(directory) as durable:
        sites = [
            (Site(workload, journal, finished=workload.at_once), costs)
            for journal, costs in ((MemoryJournal(), result.memory), (durable, result.sqlite))
        ]
        for site, _ in sites:
            await site.run(workload.at_once)
        for _ in range(rounds):
            for site, costs in sites:
                await _run_round(site, costs)
    return result


async def _run_round(site: Site, costs: Costs) -> None:
    turns = site.workload.rollouts * site.workload.turns
    cpu, clock = time.process_time(), time.perf_counter()
    await site.run(site.workload.rollouts)
    await site.registry.journal.flush()
    costs.cpu_us.append(1e6 * (time.process_time() - cpu) / turns)
    costs.rates.append(turns / (time.perf_counter() - clock))


async def measure_latency(workload: Workload, directory: Path) -> LatencyResult:
    """Run a workload with each journal. Completions take so long that the load of the machine stays low."""
    memory, _ = await _paced(workload, MemoryJournal())
    with _counted() as written:
        async with _sqlite(directory) as durable:
            sqlite, turns = await _paced(workload, durable)
    written.turns = turns
    return LatencyResult(workload, memory, sqlite, written)


async def _paced(workload: Workload, journal: Journal) -> tuple[Sequence[float], int]:
    seconds = max(_SHORTEST_GENERATION, workload.at_once / _TURNS_PER_SECOND)
    site = Site(workload, journal, generation_seconds=seconds)
    await site.run(workload.rollouts)
    return site.agent.seconds, len(site.agent.seconds)


@asynccontextmanager
async def _sqlite(directory: Path) -> AsyncIterator[Journal]:
    with TemporaryDirectory(dir=directory) as found:
        async with SqliteJournal(Path(found) / "journal") as journal:
            await journal.load()
            yield journal


@contextmanager
def _counted() -> Iterator[Written]:
    """Count the commits of all journals and the bytes that this process sends to disks."""
    written, commit = Written(), Database.commit

    def counting(self: Database, changes: Sequence[tuple[int, Change]]) -> set[int]:
        written.commits += 1
        return commit(self, changes)

    before = _disk_bytes()
    with patch.object(Database, "commit", counting):
        yield written
    written.disk = _disk_bytes() - before


def _disk_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))

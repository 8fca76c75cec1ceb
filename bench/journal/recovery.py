"""`python -m bench.journal.recovery STEP DIRECTORY FINISHED UNFINISHED TURNS`: a journal is left behind, and taken over.

Each step is a process of its own, so that the memory of one is not counted for the other. The step `leave` runs rollouts and ends
like a killed server, `take-over` restores them and prints the figures as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rollout_server.app import tune_interpreter
from rollout_server.edge.journal import SqliteJournal
from rollout_server.runtime.aio.collector import collector_paused
from rollout_server.runtime.groups.registry import GroupRegistry
from rollout_server.runtime.journal import Change, Journal, StoredGroup, StoredRollout
from rollout_server.runtime.registry.rollout_index import Selection
from rollout_server.runtime.start_request import Caller

from bench.journal.workload import Site, Workload, check_end
from bench.programs.child import ChildFailed
from bench.programs.loop import new_loop

_AT_ONCE = 100
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Recovery:
    """A restart with a journal.

    Args:
        finished, unfinished: rollouts of the earlier process.
        turns: turns of a finished rollout. The unfinished ones wait for the completion of the last turn but one.
        open_seconds: opening the database.
        load_seconds: reading and decoding it.
        restore_seconds: rebuilding the rollouts from what was read, after which the server takes requests.
        resume_seconds: from then on until all unfinished rollouts have replayed their turns and reached their end.
        disk_bytes: size of the journal's files.
        idle_bytes, peak_bytes: resident memory before the journal is opened, and its peak up to the end of the restoring.
    """

    finished: int
    unfinished: int
    turns: int
    open_seconds: float
    load_seconds: float
    restore_seconds: float
    resume_seconds: float
    disk_bytes: int
    idle_bytes: int
    peak_bytes: int

    @property
    def seconds(self) -> float:
        """Seconds from the start until the server takes requests, apart from the start of Python."""
        return self.open_seconds + self.load_seconds + self.restore_seconds


def measure_recovery(directory: Path, finished: int, unfinished: int, turns: int) -> Recovery:
    """Leave a journal behind and take it over. Raises `ChildFailed`."""
    with TemporaryDirectory(dir=directory) as found:
        numbers = [str(number) for number in (finished, unfinished, turns)]
        _step("leave", found, numbers)
        return Recovery(**json.loads(_step("take-over", found, numbers)))


def _step(name: str, directory: str, numbers: Sequence[str]) -> str:
    command = [sys.executable, "-m", "bench.journal.recovery", name, directory, *numbers]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ChildFailed(f"{name} failed: {done.stderr[-2000:]}")
    return done.stdout


class _TimedJournal:
    """A journal that measures how long `load` takes."""

    is_durable = True
    seconds = 0.0

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.server_id = journal.server_id

    @property
    def problem(self) -> str:
        return self._journal.problem

    async def load(self) -> Sequence[StoredRollout]:
        began = time.perf_counter()
        stored = await self._journal.load()
        self.seconds = time.perf_counter() - began
        return stored

    async def load_groups(self) -> Sequence[StoredGroup]:
        return await self._journal.load_groups()

    def write(self, change: Change, committed: Callable[[], None] | None = None) -> None:
        self._journal.write(change, committed)

    async def flush(self, *, patient: bool = True) -> None:
        await self._journal.flush(patient=patient)


async def _leave(directory: Path, finished: int, unfinished: int, turns: int) -> None:
    """Run rollouts, and end without closing the journal."""
    async with SqliteJournal(directory / "journal") as journal:
        await journal.load()
        site = Site(Workload(max(_AT_ONCE, unfinished), finished, turns), journal)
        await site.run(finished)
        for _ in range(unfinished):
            await site.start(blocked_turn=turns - 1)
            await site.blocked.acquire()
        await journal.flush()
        os._exit(0)


async def _take_over(directory: Path, finished: int, unfinished: int, turns: int) -> Recovery:
    idle = _memory("VmRSS")
    began = time.perf_counter()
    async with SqliteJournal(directory / "journal") as journal:
        opened = time.perf_counter()
        timed = _TimedJournal(journal)
        site = Site(Workload(max(_AT_ONCE, unfinished), finished, turns), timed)
        groups = GroupRegistry(site.registry)
        with collector_paused():
            await groups.load()
        await groups.resume()
        restored = time.perf_counter()
        peak, size = _memory("VmHWM"), sum(file.stat().st_size for file in (directory / "journal").iterdir())
        every = site.registry.select(Selection(Caller("bench")))
        resumed = [rollout for _, rollout in every if rollout.outcome is None]
        for rollout in resumed:
            await rollout.log.final_entry()
            check_end(rollout)
        ended = time.perf_counter()
    if len(resumed) != unfinished:
        raise RuntimeError(f"{len(resumed)} rollouts were continued, not {unfinished}")
    times = opened - began, timed.seconds, restored - opened - timed.seconds, ended - restored
    return Recovery(finished, unfinished, turns, *times, size, idle, peak)


def _memory(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    step, place, *given = sys.argv[1:]
    arguments = Path(place), *map(int, given)
    tune_interpreter()
    with asyncio.Runner(loop_factory=new_loop) as runner:
        if step == "leave":
            runner.run(_leave(*arguments))
        else:
            print(json.dumps(asdict(runner.run(_take_over(*arguments)))))

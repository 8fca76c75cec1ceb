"""Programs that the benchmark starts: on which core they run, and what Linux says they use."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import aiohttp

_START_SECONDS = 60.0
_STOP_SECONDS = 15.0
_POLL_SECONDS = 0.005
_SHOWN = 4000


class ChildFailed(Exception):
    """A program ended, or did not get ready; the text holds the end of what it wrote."""


@dataclass(frozen=True, slots=True)
class Program:
    """What to start.

    Args:
        name: for people.
        command: its arguments.
        url: base URL; `/health` answers 200 once it is ready.
        cores: those it may run on.
        environment: all of it.
        directory: where it runs.
    """

    name: str
    command: Sequence[str]
    url: str
    cores: frozenset[int]
    environment: dict[str, str]
    directory: Path


@dataclass(frozen=True, slots=True)
class Child:
    """A program that runs. `started_in` is the time from its start to its first healthy answer, in seconds."""

    pid: int
    started_in: float

    def cpu_seconds(self) -> float:
        """User and system time of all its threads so far, those that have ended included."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        """Memory that it holds now."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Cores:
    """Where programs run: what is measured by itself, everything else beside it. The same sets where there is one core."""

    measured: frozenset[int]
    beside: frozenset[int]

    @classmethod
    def here(cls) -> Cores:
        """The first two of the cores that this program may use."""
        if not hasattr(os, "sched_getaffinity"):
            every = frozenset(range(os.cpu_count() or 1))
            return cls(every, every)
        usable = sorted(os.sched_getaffinity(0))
        return cls(frozenset(usable[:1]), frozenset(usable[1:2] or usable[:1]))

    @property
    def apart(self) -> bool:
        """What is measured has a core of its own."""
        return not self.measured & self.beside


@contextmanager
def on_cores(cores: frozenset[int]) -> Iterator[None]:
    """Runs this thread, and the programs it starts meanwhile, on these cores only."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@asynccontextmanager
async def running(program: Program) -> AsyncIterator[Child]:
    """A program from its start to its end. Raises `ChildFailed` where it does not get ready."""
    with tempfile.TemporaryFile() as output:
        began = time.monotonic()
        with on_cores(program.cores):
            spawned = await asyncio.create_subprocess_exec(
                *program.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=program.environment,
                cwd=program.directory,
            )
        try:
            await _until_healthy(program, spawned, output)
            yield Child(spawned.pid, time.monotonic() - began)
        finally:
            await _stop(spawned)


async def _until_healthy(program: Program, spawned: Process, output: IO[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    async with aiohttp.ClientSession() as http:
        while not await _is_healthy(http, f"{program.url}/health"):
            if spawned.returncode is not None or time.monotonic() > deadline:
                state = "is not ready" if spawned.returncode is None else f"ended with status {spawned.returncode}"
                output.seek(0)
                raise ChildFailed(f"{program.name} {state}\n{output.read().decode(errors='replace')[-_SHOWN:]}")
            await asyncio.sleep(_POLL_SECONDS)


async def _is_healthy(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url) as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def _stop(spawned: Process) -> None:
    if spawned.returncode is None:
        spawned.terminate()
    try:
        await asyncio.wait_for(spawned.wait(), _STOP_SECONDS)
    except TimeoutError:
        spawned.kill()
        await spawned.wait()


def busy_seconds(cores: frozenset[int]) -> float:
    """For how long these cores were not idle since the machine started, whoever used them, the host of a guest included."""
    wanted = {f"cpu{core}" for core in cores}
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    ticks = [list(map(int, fields[1:9])) for fields in lines if fields and fields[0] in wanted]
    # user nice system (idle iowait) irq softirq steal
    return sum(sum(one[:3]) + sum(one[5:]) for one in ticks) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port

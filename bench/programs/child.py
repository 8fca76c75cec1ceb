"""Child processes of the benchmark: CPU affinity, and CPU and memory usage from /proc."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import aiohttp

_START_SECONDS = 180.0
_STOP_SECONDS = 15.0
_POLL_SECONDS = 0.005
_SHOWN = 4000


class ChildFailed(Exception):
    """A program exited or did not become healthy. The text contains the end of its output."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program to start.

    Args:
        name: name for messages.
        command: command line.
        url: base URL; `/health` returns 200 once the program is ready.
        cores: CPU affinity.
        environment: the complete environment; nothing is inherited.
        directory: working directory.
    """

    name: str
    command: Sequence[str]
    url: str
    cores: frozenset[int]
    environment: dict[str, str]
    directory: Path


@dataclass(frozen=True, slots=True)
class Child:
    """A running program. `started_in` is the time from its start to its first healthy response, in seconds."""

    pid: int
    started_in: float

    def cpu_seconds(self) -> float:
        """Return user and system time of all its threads so far, including threads that have ended."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        """Return its current resident memory."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Cores:
    """CPU cores: one set for the measured program, one for everything else. On a single core both sets are the same."""

    measured: frozenset[int]
    beside: frozenset[int]

    @classmethod
    def here(cls) -> Cores:
        """Return the first two cores that this process may use."""
        if not hasattr(os, "sched_getaffinity"):
            every = frozenset(range(os.cpu_count() or 1))
            return cls(every, every)
        usable = sorted(os.sched_getaffinity(0))
        return cls(frozenset(usable[:1]), frozenset(usable[1:2] or usable[:1]))

    @property
    def apart(self) -> bool:
        """Whether the measured program has a core for itself."""
        return not self.measured & self.beside


@contextmanager
def on_cores(cores: frozenset[int]) -> Iterator[None]:
    """Pin this thread, and the programs that it starts meanwhile, to these cores."""
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
    """Run a program inside the `async with` block. Raises `ChildFailed` if it does not become healthy."""
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
                state = "is not healthy" if spawned.returncode is None else f"exited with status {spawned.returncode}"
                output.seek(0)
                raise ChildFailed(f"{program.name} {state}\n{output.read().decode(errors='replace')[-_SHOWN:]}")
            await asyncio.sleep(_POLL_SECONDS)


async def _is_healthy(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url) as response:
            return response.status == 200
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
    """Return how long these cores were busy since boot, with any process, and with time stolen by the hypervisor."""
    wanted = {f"cpu{core}" for core in cores}
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    ticks = [list(map(int, fields[1:9])) for fields in lines if fields and fields[0] in wanted]
    # user nice system (idle iowait) irq softirq steal
    return sum(sum(one[:3]) + sum(one[5:]) for one in ticks) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """Return a port that was free a moment ago. It is below those that Linux gives to outgoing connections.

    So only another process that chooses its port in this way may take it before it is used.
    """
    while True:
        port = 20_000 + secrets.randbelow(12_768)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port

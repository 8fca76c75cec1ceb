"""`python -m bench.workers`: what several workers cost and gain, compared with one process.

One worker and everything around it, trainer and driver, run on one core; N workers and everything around them on N cores. So the
ratio of the rates says how well the service uses further cores, on a machine that has no cores to spare for the load.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import aiohttp
from rich.console import Console
from rich.table import Table
from rollout_server.testing.tokenizer import TOY_TOKENIZER

from bench.judge.site import Bench, Running, get
from bench.judge.workload import ON_DISK, Plan, Target, Workload
from bench.programs.child import ChildFailed, Cores
from bench.programs.conversation import Facts
from bench.programs.drive import Order, Player, WrongRollout, grpc_player, http_player, play_many
from bench.programs.loop import new_loop
from bench.programs.trainer import JUDGED

_WIDTH = 120
_APIS = ("POST /rollout", "gRPC, tokens")


@dataclass(slots=True)
class _Subject:
    """One API of a server with so many workers, and the rounds: wall seconds and CPU seconds of all its processes.

    `cores` are those of the server, the trainer and the driver.
    """

    api: str
    workers: int
    cores: Sequence[int]
    server: Running
    play: Player
    rounds: list[tuple[float, float]] = field(default_factory=list)


async def run(workload: Workload, workers: int, console: Console) -> None:
    """Measure, and print a table. Raises `ChildFailed`, and `WrongRollout`."""
    every = frozenset(os.sched_getaffinity(0))
    if len(every) < workers:
        raise ChildFailed(
            f"{workers} workers need {workers} cores to be compared with one on one core; there are {len(every)}"
        )
    subjects: list[_Subject] = []
    async with AsyncExitStack() as stack:
        for number in (1, workers):
            settings = {"ROLLOUT_WORKERS": str(number)}
            bench = Bench(Plan((workload,), 0), TOY_TOKENIZER, Cores(every, every), settings=settings)
            server = await stack.enter_async_context(bench.server(ON_DISK))
            if number == 1:
                trainer = await stack.enter_async_context(bench.trainer(server.url))
                connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
                http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
                facts = await get(http, f"{trainer.url}/conversations/{workload.conversation}", Facts)
            judged = Order(workload.conversation, f"{trainer.url}/{JUDGED}/{workload.conversation}", facts)
            tokens = Order(workload.conversation, f"grpc://127.0.0.1:{trainer.grpc_port}", facts)
            players = http_player(http, server.url, judged), grpc_player(server.channel, tokens)
            for api, play in zip(_APIS, players, strict=True):
                subjects.append(_Subject(api, number, sorted(every)[:number], server, play))
        for subject in subjects:
            await play_many(subject.play, workload.concurrency, workload.concurrency)
        for number in range(workload.rounds):
            console.print(f"round {number + 1} of {workload.rounds}")
            for subject in subjects:
                for pid in (os.getpid(), trainer.child.pid, *_tree(subject.server.child.pid)):
                    _pin(pid, subject.cores)
                await _round(subject, workload)
    Console(width=_WIDTH).print(_table(subjects, workload))


async def _round(subject: _Subject, workload: Workload) -> None:
    cpu, began = _cpu_seconds(subject.server.child.pid), time.perf_counter()
    await play_many(subject.play, workload.rollouts, workload.concurrency)
    subject.rounds.append((time.perf_counter() - began, _cpu_seconds(subject.server.child.pid) - cpu))


def _pin(pid: int, cores: Sequence[int]) -> None:
    """Pin all threads of a process."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # it ended
            os.sched_setaffinity(int(thread.name), cores)


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time so far of a process and its descendants."""
    ticks = 0
    for each in _tree(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(") ")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _tree(pid: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    yield pid
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in listed.read_text().split():
            yield from _tree(int(child))


def _table(subjects: list[_Subject], workload: Workload) -> Table:
    table = Table("API", "workers", "cores", "ms of CPU per turn", "turns/s", "times one", box=None)
    turns, single = workload.rollouts * workload.turns, dict[str, float]()
    for each in subjects:
        wall, cpu = (median(values) / turns for values in zip(*each.rounds, strict=True))
        of_one = single.setdefault(each.api, wall)
        table.add_row(
            each.api,
            str(each.workers),
            str(len(each.cores)),
            f"{1000 * cpu:.2f}",
            f"{1 / wall:,.0f}",
            f"{of_one / wall:.2f}",
        )
    return table


def main() -> int:
    """Run the benchmark."""
    parser = ArgumentParser("python -m bench.workers", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--workers", type=int, default=2, help="workers to compare with one process")
    parser.add_argument("--rounds", type=int, default=5)
    options, console = parser.parse_args(), Console(stderr=True)
    workload = Workload(10, 1000, 64, 256, Target(2.0, "x"), rounds=options.rounds)
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(run(workload, options.workers, console))
    except (ChildFailed, WrongRollout) as error:
        console.print(f"bench: {error}", style="red", markup=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs a plan: starts the programs, runs the rounds, and measures their cost.

The rounds of all APIs of a workload and of their floors are interleaved, so that a slow moment of the machine affects all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_server.testing.tokenizer import TOY_TOKENIZER

from bench.judge.lag import Lag
from bench.judge.loads import Load, Loads
from bench.judge.result import Result, Round, Row, Start, summary
from bench.judge.site import Bench, Running, Site, get, post, site
from bench.judge.waiting import waiting_bytes
from bench.judge.workload import FLOOR_FACTOR, FLOORS, IN_MEMORY, ON_DISK, WARM_UP, Api, Floor, Plan, Workload
from bench.programs.child import Child, Cores, busy_seconds, on_cores
from bench.programs.machine import machine
from bench.programs.tally import Counts, Traffic

Say = Callable[[str], Any]


@dataclass(slots=True)
class _Subject:
    """What is measured in turn: an API of a server, or a floor."""

    name: str
    program: Running
    load: Load
    rollouts: int
    lag: Lag
    rounds: list[Round] = field(default_factory=list)
    waiting: float | None = None


async def run(plan: Plan, tokenizer: Path, say: Say, base: Path | None = None) -> Result:
    """Run a plan. `base`: another clone, whose server is measured beside. Raises `ChildFailed` and `WrongRollout`."""
    cores = Cores.here()
    bench = Bench(plan, tokenizer, cores, base)
    journals = [ON_DISK, IN_MEMORY] if any(each.in_memory for each in plan.workloads) else [ON_DISK]
    with on_cores(cores.beside):
        starts = [await _start_once(bench, say) for _ in range(plan.starts)]
        say("starting servers, trainer and floor")
        async with site(bench, journals) as programs:
            rows: list[Row] = []
            for workload in plan.workloads:
                rows += await _measure(bench, programs, workload, say)
            counts = await get(programs.http, f"{programs.trainer.url}/counts", Counts)
            resident = programs.servers[ON_DISK].child.resident_bytes()
    name = "toy" if tokenizer == TOY_TOKENIZER else tokenizer.name
    return Result(machine(), name, cores.apart, starts, resident, rows, counts)


async def _start_once(bench: Bench, say: Say) -> Start:
    say("measuring the start of the server")
    async with bench.server(ON_DISK) as server:
        child = server.child
        return Start(child.started_in, child.cpu_seconds(), child.resident_bytes())


async def _measure(bench: Bench, site: Site, workload: Workload, say: Say) -> list[Row]:
    loads = await Loads.of(site, workload)
    floors = {
        floor: _floor_subject(site, loads, floor) for floor in dict.fromkeys(map(FLOORS.__getitem__, workload.apis))
    }
    servers = {key: _server_subject(site, loads, *key) for key in _keys(site, workload)}
    subjects = [*floors.values(), *servers.values()]
    timer = _Timer(site, bench.cores)
    for subject in subjects:
        say(f"{workload}: warming up {subject.name}")
        await _warm_up(subject, workload)
    for number in range(workload.rounds):
        say(f"{workload}: round {number + 1} of {workload.rounds}")
        for subject in subjects:
            await timer.round(subject, workload)
    for api in workload.waiting:
        say(f"{workload}: memory of waiting rollouts, {api} and its floor")
        servers[api, ON_DISK].waiting = await waiting_bytes(bench, site, loads, api)
        floor = floors[FLOORS[api]]
        floor.waiting = floor.waiting or await waiting_bytes(bench, site, loads, FLOORS[api])
    return [
        Row(
            workload=workload.name,
            title=str(workload),
            turns=workload.turns,
            api=api,
            journal=journal,
            prompt_tokens=loads.facts.prompt_tokens,
            server=_cost(subject, workload),
            floor=_cost(floors[FLOORS[api]], workload),
            target=workload.target_of(api),
        )
        for (api, journal), subject in servers.items()
    ]


def _keys(site: Site, workload: Workload) -> Iterator[tuple[Api, str]]:
    for api in workload.apis:
        yield api, ON_DISK
        if api in workload.in_memory:
            yield api, IN_MEMORY
        if "base" in site.servers:
            yield api, "base"


def _server_subject(site: Site, loads: Loads, api: Api, journal: str) -> _Subject:
    server = site.servers[journal]
    lag = Lag(site.http, server.url)
    return _Subject(f"{api}, {journal}", server, loads.server(api, server), loads.workload.rollouts, lag)


def _floor_subject(site: Site, loads: Loads, floor: Floor) -> _Subject:
    lag = Lag(site.http, site.floor.url)
    rollouts = loads.workload.rollouts * FLOOR_FACTOR
    return _Subject(str(floor), site.floor, loads.floor(floor, site.floor), rollouts, lag)


def _cost(subject: _Subject, workload: Workload) -> Any:
    return summary(subject.rounds, workload.turns, subject.lag.percentile_ms(0.99), subject.waiting)


async def _warm_up(subject: _Subject, workload: Workload) -> None:
    """Open connections and load tokenizers."""
    rollouts = min(workload.concurrency, WARM_UP)
    async with subject.load(rollouts, workload.concurrency) as play:
        await play()


@dataclass(frozen=True, slots=True)
class _Timer:
    """Measures the CPU of one program, of trainer and driver, and of other processes on the program's core."""

    site: Site
    cores: Cores

    async def round(self, subject: _Subject, workload: Workload) -> None:
        """Run and measure one round."""
        turns = subject.rollouts * workload.turns
        async with subject.load(subject.rollouts, workload.concurrency) as play:
            await self._traffic()
            async with subject.lag:
                before = self._read(subject.program.child)
                await play()
                after = self._read(subject.program.child)
        cpu, beside, busy, wall = (late - early for late, early in zip(after, before, strict=True))
        traffic = await self._traffic()
        subject.rounds.append(Round(turns, cpu, beside, busy - cpu, wall, traffic))

    async def _traffic(self) -> Traffic:
        return await post(self.site.http, f"{self.site.trainer.url}/traffic", {}, Traffic)

    def _read(self, child: Child) -> tuple[float, float, float, float]:
        beside = self.site.trainer.child.cpu_seconds() + time.process_time()
        return child.cpu_seconds(), beside, busy_seconds(self.cores.measured), time.perf_counter()

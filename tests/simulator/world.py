"""A world: a server with callers, trainer, tools, receiver and disk, and the crashes that a seed draws."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from unittest.mock import patch

from rollout_server.runtime.groups.registry import GroupRegistry
from rollout_server.runtime.log import Entry
from rollout_server.runtime.ports import Clock
from rollout_server.runtime.registry.dependencies import Attempt, DeliveryRetryPolicy, RegistryDependencies
from rollout_server.runtime.registry.registry import RolloutRegistry
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.start_request import Caller, Capacity, Quota

from tests.simulator.agents import agents_of
from tests.simulator.callers import Callers, Client, pause_policies
from tests.simulator.coverage import Cell
from tests.simulator.disk import Disk, DiskJournal
from tests.simulator.faults import Fault, Faults
from tests.simulator.jobs import draw_jobs
from tests.simulator.laws import Laws
from tests.simulator.receiver import FakeReceiver, FakeReporter
from tests.simulator.scheduler import SeededLoop
from tests.simulator.tools import tools_of
from tests.simulator.trainer import FakeTrainer

_ADMIN = Caller("admin", admin=True)
_BUGS = ("rollout_server.runtime.registry.registry", "rollout_server.runtime.replay")
"""Loggers that log an error only for a bug of the server."""
EPOCH = 1_700_000_000.0
_FAULTS_END = 120.0
"""Seconds after which the last process of a world has no faults any more."""
_LONGEST = 3000.0
"""Seconds within which everything must have ended after that."""


class World:
    """One seed.

    Attributes:
        trace: what happened, a line each.
        excused: the rollouts in which agent or sampler raised an exception on purpose.
        life: the process of the server that runs now.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.draw = Random(seed)
        self.faults = Faults(self.draw)
        self.laws = Laws()
        self.trace: list[str] = []
        self.disk = Disk(self.laws)
        self.trainer = FakeTrainer(self)
        self.receiver = FakeReceiver(self)
        self.callers = Callers(self)
        self.jobs = draw_jobs(self.draw)
        self.capacity = Capacity(
            running=self.draw.randint(1, 4),
            queued=self.draw.choice((2, 10)),
            per_caller=self.draw.choice((Quota(), Quota(running=1))),
            finished=self.draw.choice((1, 100)),
            finished_seconds=self.draw.choice((5.0, 3600.0)),
        )
        self.expiry = self.draw.choice((10.0, 1000.0))
        self.tools = tools_of(self)
        self.excused: set[str] = set()
        self.cells: Counter[Cell] = Counter()
        self.resumes = self.draw.random() < 0.5
        self.crashes = self.draw.choice((0, 1, 2, 2, 3))
        self.now = 1000.0
        self.life: Life = None  # type: ignore[assignment]
        self._numbers = 0

    def next_number(self) -> int:
        """Return a new number."""
        self._numbers += 1
        return self._numbers

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        loop = self.life.loop
        self.trace.append(f"{self.life.number} {loop.steps:5} {loop.now:9.3f} {text}")

    def run(self) -> World:
        """Run all processes of the server, one after the other."""
        with _watched(self.laws), patch("rollout_server.runtime.run.recorded_effects.secrets", self):
            for number in range(self.crashes + 1):
                self.life = Life(self, number, is_last=number == self.crashes)
                self.life.run()
                self.now = self.life.loop.now + self.draw.choice((0.1, 5.0, 60.0))
        return self

    def randbits(self, bits: int) -> int:
        """Take the place of `secrets`, which would differ in each process."""
        return self.draw.getrandbits(bits)


class Life:
    """One process of the server, from its start to its crash or its orderly end.

    Attributes:
        dead: the process has crashed; nothing that its tasks do has any effect.
        sandboxes: the uids of rollouts that have an open sandbox.
    """

    def __init__(self, world: World, number: int, *, is_last: bool) -> None:
        draw = world.draw
        self.world = world
        self.number = number
        self.dead = False
        self.sandboxes: list[str] = []
        self.loop = SeededLoop(world.now, Random(draw.getrandbits(32)) if draw.random() < 0.5 else None)
        self.journal = DiskJournal(world.disk, draw, world.faults)
        self.reporter = FakeReporter(world.receiver, self)
        self.registry: RolloutRegistry = None  # type: ignore[assignment]
        self.groups: GroupRegistry = None  # type: ignore[assignment]
        self._is_last = is_last
        self._crash_at = None if is_last else draw.randint(1, draw.choice((4, 30, 300, 600, 600)))
        self._drain_at = draw.uniform(0, 15) if not is_last and draw.random() < 0.4 else None
        self._restoring = True
        self._draining = False

    def run(self) -> None:
        """Run the process to its end."""
        main = self.loop.create_task(self._main())
        try:
            if not self.loop.run_steps(main.done, lambda: self._crash_at):
                self._count_crash()
            self.world.note("crash" if not main.done() else "end")
            if main.done():
                main.result()
        finally:
            self.dead = True
            self.journal.die()
            self.loop.abandon()
            for error in self.loop.errors:
                self.world.laws.require(False, f"unhandled: {error}")

    def _count_crash(self) -> None:
        faults = self.world.faults
        faults.count(Fault.CRASH)
        if self._restoring:
            faults.count(Fault.CRASH_IN_RESTORE)
        if self._draining:
            faults.count(Fault.CRASH_IN_DRAIN)

    async def _main(self) -> None:
        self._open()
        await self.groups.load()
        await self.groups.resume()
        self._restoring = False
        clients = [asyncio.create_task(Client(self, job).run()) for job in self.world.jobs]
        pauses = asyncio.create_task(pause_policies(self))
        if self._drain_at is not None:
            await asyncio.sleep(self._drain_at)
            await self._drain()
            return
        if self._is_last:
            await asyncio.wait([*clients, pauses], timeout=self.world.draw.choice((0.0, _FAULTS_END)))
            self.world.faults.calm = True
            await asyncio.wait([*clients, pauses], timeout=_LONGEST)
            await self._check_quiet(clients)
            return
        await asyncio.wait(clients)
        await asyncio.sleep(10)

    def _open(self) -> None:
        world, loop = self.world, self.loop
        self.registry = RolloutRegistry(
            agents_of(world),
            world.trainer.opener(self),
            lambda: f"sim-{world.next_number()}",
            capacity=world.capacity,
            dependencies=RegistryDependencies(
                Clock(lambda: EPOCH + loop.time(), loop.time),
                self,
                self.reporter,
                DeliveryRetryPolicy(expiry=world.expiry),
                journal=self.journal,
                resume_by_default=world.resumes,
            ),
        )
        self.groups = GroupRegistry(self.registry)

    async def _drain(self) -> None:
        self.world.faults.count(Fault.DRAIN)
        self._draining = True
        grace = self.world.draw.choice((0.0, 5.0, 40.0))
        if self.world.draw.random() < 0.5:
            self._crash_at = self.loop.steps + self.world.draw.randint(1, 60)
        self.world.note(f"drain {grace}")
        await self.registry.drain(grace)
        self._draining = False
        await self.journal.flush()
        for _, rollout in self.registry.select(Selection(_ADMIN)):
            stopped = rollout.outcome is not None or rollout.is_suspended
            self.world.laws.require(stopped, f"{rollout.uid} has neither ended nor is it suspended after a drain")

    async def _check_quiet(self, clients: Sequence[asyncio.Task[None]]) -> None:
        """Check that everything has ended and nothing is held any more."""
        laws, registry = self.world.laws, self.registry
        for client in clients:
            laws.require(client.done(), "a rollout that was accepted did not end, or a request is never accepted")
            if client.done() and not client.cancelled() and client.exception() is not None:
                raise client.exception()  # type: ignore[misc]
        await asyncio.sleep(self.world.expiry + 100)
        held = (registry.running, registry.queued, registry.active_bytes, registry.owed)
        laws.require(held == (0, 0, 0, 0), f"still held at the end: running, queued, bytes, outcomes = {held}")
        laws.require(not self.sandboxes, f"sandboxes without cleanup: {self.sandboxes}")
        await registry.drain(0)
        await self.journal.flush()

    def recorded(self, rollout: Rollout, entries: Sequence[Entry]) -> None:
        """Observe what the server publishes."""
        if self.dead:
            return
        laws, world = self.world.laws, self.world
        for entry in entries:
            world.note(f"{rollout.uid} {entry.sequence} {entry.record!r}")
            committed = world.disk.has(rollout.uid, entry.sequence)
            laws.require(committed, f"{rollout.uid}: event {entry.sequence} was published before its commit")
        most = world.capacity.running
        laws.require(self.registry.running <= most, f"{self.registry.running} rollouts run, at most {most} may")

    def delivered(self, rollout: Rollout, attempt: Attempt, milliseconds: float) -> None:
        """Observe an attempt to deliver an outcome."""
        if not self.dead:
            self.world.note(f"{rollout.uid} delivery {attempt.value}")


class _Bugs(logging.Handler):
    """Notes bugs that the server has logged."""

    def __init__(self, laws: Laws) -> None:
        super().__init__(logging.ERROR)
        self._laws = laws

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._laws.require(False, f"logged: {record.getMessage()}: {error!r}")


@contextmanager
def _watched(laws: Laws) -> Iterator[None]:
    """Silence all loggers but those of bugs, and the collector of cycles.

    The collector would run destructors at steps that the seed does not determine.
    """
    package, bugs, collects = logging.getLogger("rollout_server"), _Bugs(laws), gc.isenabled()
    before = package.level
    package.setLevel(logging.CRITICAL + 1)
    watched = [logging.getLogger(name) for name in _BUGS]
    for logger in watched:
        logger.setLevel(logging.ERROR)
        logger.propagate = False
        logger.addHandler(bugs)
    gc.disable()
    try:
        yield
    finally:
        package.setLevel(before)
        for logger in watched:
            logger.removeHandler(bugs)
            logger.setLevel(logging.NOTSET)
            logger.propagate = True
        if collects:
            gc.enable()

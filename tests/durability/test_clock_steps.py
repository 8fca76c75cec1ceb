"""The wall clock is set while a server runs, or while it is stopped: neither time limits nor deliveries follow it."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from rollout_server import Agent, Run, app
from rollout_server.runtime.ports import Clock
from rollout_server.runtime.registry.dependencies import RegistryDependencies

from tests.durability.stage import SECONDS, Stage
from tests.durability.trials import trial
from tests.support.server_client import Caller, serving, until
from tests.support.start_requests import seconds, start

HOURS = 7200.0


class Stepwise(Agent):
    """Write a note at each step, of which there are two."""

    name = "stepwise"
    replayable = True

    def __init__(self) -> None:
        self.steps = asyncio.Semaphore(0)

    async def play(self, run: Run) -> None:
        """Write a note, wait, write a note, wait."""
        for code in ("first", "second"):
            run.note(code, "")
            await self.steps.acquire()


async def noted(caller: Caller, uid: str, count: int) -> None:
    """Wait until the rollout has this many events."""

    async def is_there() -> bool:
        return (await caller.get(uid)).last_sequence >= count

    await until(is_there)


@pytest.mark.parametrize("step", [HOURS, -HOURS])
async def test_a_step_is_no_running_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    wrong = 0.0
    clock = Clock(wall=lambda: time.time() + wrong)
    monkeypatch.setattr(app, "RegistryDependencies", partial(RegistryDependencies, clock=clock))
    agents = [Stepwise(), Stepwise()]
    settings = {"journal": str(tmp_path / "j"), "drain_seconds": 0}
    async with serving(agents[0], **settings) as caller:
        uid = (await caller.start(start(agent="stepwise", limits={"time": seconds(60)}))).rollout.uid
        await noted(caller, uid, 2)
        wrong = step
        agents[0].steps.release()
        await noted(caller, uid, 3)
    async with serving(agents[1], **settings) as caller:
        agents[1].steps.release()
        agents[1].steps.release()
        rollout = await caller.finished(uid)
        times = [event.time.ToNanoseconds() / 1e9 for event in await caller.events(uid)]
    assert rollout.outcome.stop.reason == "stop"
    assert rollout.outcome.metrics.total_ms < 60_000
    assert sorted(times) == times
    for process in (times[:3], times[3:]):
        assert process[-1] - process[0] < 60


async def test_a_delivery_does_not_wait_for_a_clock_that_was_set_back(here: Stage) -> None:
    chosen = trial("grpc", 2, "set back")
    await here.prepare([chosen])
    here.receiver.is_down = True
    here.trainers.generations.counts.clear()
    await here.clients.start(chosen)
    while len(here.receiver.deliveries) < 3:  # noqa: ASYNC110 - one is that of the undisturbed run
        await asyncio.sleep(0.01)
    here.server.kill()
    await here.server.ended()
    with closing(sqlite3.connect(here.server.journal / "journal.sqlite3")) as connection, connection:
        later = "UPDATE deliveries SET next_attempt = expires + ?, expires = expires + ? WHERE state = 'pending'"
        assert connection.execute(later, (HOURS, HOURS)).rowcount == 1
    here.receiver.is_down = False
    await here.server.restart()
    async with asyncio.timeout(SECONDS):
        await here.recover_and_check([chosen])

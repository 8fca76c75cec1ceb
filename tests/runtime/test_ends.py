"""Agents that ignore the end of their rollout: it still ends, and its slot becomes free."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from rollout_server import Agent, Limits, Run
from rollout_server.core.outcome import Cancellation, Category, Failure, Stop
from rollout_server.core.record import Note
from rollout_server.runtime.errors import RolloutEnded
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.start_request import Capacity

from tests.support.runtime_harness import (
    FOREVER,
    ME,
    Looping,
    RuntimeHarness,
    Say,
    call,
    check_log,
    contents,
    outcome_of,
    wait,
)


async def test_an_agent_that_swallows_the_end_does_not_change_it(new_world: type[RuntimeHarness]) -> None:
    class Deaf(Agent):
        name = "deaf"

        async def play(self, run: Run) -> None:
            for _ in range(3):
                with suppress(RolloutEnded):
                    await run.sample()
            with suppress(RolloutEnded):
                await run.append({"role": "user", "content": "not heard"})
            with suppress(RolloutEnded):
                await run.call([call("add")])
            with suppress(RolloutEnded):
                await run.finish("mine")
            raise LookupError

    rollout = new_world(Deaf()).start(limits=Limits(turns=1))
    outcome = await outcome_of(rollout)
    assert outcome.end == Stop("max_turns")
    assert contents(outcome, "user") == ["5 + 3?"]


class Stubborn(Agent):
    """Ignore cancellation until the test allows it. There is an upper bound, so that a failed test terminates."""

    name = "stubborn"

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.refused = 0

    async def play(self, run: Run) -> None:
        await run.sample()
        while not self.free.is_set() and self.refused < 100:
            try:
                await self.free.wait()
            except BaseException:
                self.refused += 1


@pytest.mark.parametrize("how", ["cancel", "time"])
async def test_an_agent_that_does_not_give_way_ends_once_and_frees_its_place(
    new_world: type[RuntimeHarness], how: str
) -> None:
    agent = Stubborn()
    world = new_world(agent, Looping(), capacity=Capacity(running=1))
    rollout = world.start(limits=Limits(seconds=30))
    waiting = world.start(agent="looping")
    await asyncio.sleep(1)
    if how == "cancel":
        world.roster.cancel(Selection(ME, uids=(rollout.uid,)), "not needed")
    outcome = await outcome_of(rollout)
    if how == "cancel":
        assert outcome.end == Cancellation("not needed")
    else:
        assert isinstance(outcome.end, Failure)
        assert outcome.end.category is Category.TIMEOUT
    await asyncio.sleep(1)
    assert world.opened == ["r1"]  # it keeps its slot for a while, so that slots are not overbooked
    assert (await outcome_of(waiting)).end == Stop("stop")
    assert agent.refused == 1
    agent.free.set()
    await asyncio.sleep(1)
    assert check_log(rollout) == outcome
    assert (world.roster.running, world.roster.queued, world.roster.totals.finished) == (0, 0, 2)


async def test_an_agent_that_asks_again_and_again_after_its_end_ends_once_and_frees_its_place(
    new_world: type[RuntimeHarness],
) -> None:
    class Pushing(Agent):
        name = "pushing"
        free = False
        pushed = 0

        async def play(self, run: Run) -> None:
            while not Pushing.free and Pushing.pushed < 1000:
                try:
                    await run.sample()
                except BaseException:
                    Pushing.pushed += 1

    world = new_world(Pushing(), Looping(), capacity=Capacity(running=1))
    rollout = world.start(limits=Limits(turns=1))
    waiting = world.start(agent="looping")
    assert (await outcome_of(rollout)).end == Stop("max_turns")
    assert (await outcome_of(waiting)).end == Stop("stop")
    pushed = Pushing.pushed
    await asyncio.sleep(100)
    assert pushed < Pushing.pushed < pushed + 200
    Pushing.free = True
    await asyncio.sleep(2)
    check_log(rollout)


async def test_what_play_still_does_after_its_end_is_there_when_it_is_judged(new_world: type[RuntimeHarness]) -> None:
    class Finishing(Agent):
        name = "finishing"
        seen = 0

        async def play(self, run: Run) -> None:
            try:
                await super().play(run)
                await run.finish("enough")
            finally:
                await asyncio.sleep(3)
                Finishing.seen = run.turn
                run.note("finishing", "done")

        async def reward(self, run: Run) -> float:
            return Finishing.seen

    rollout = new_world(Finishing()).start()
    outcome = await outcome_of(rollout)
    assert (outcome.end, outcome.reward_result.reward) == (Stop("enough"), 1.0)
    assert isinstance(rollout.log.entries[-2].record, Note)


async def test_an_agent_that_goes_on_after_its_end_reaches_nothing(new_world: type[RuntimeHarness]) -> None:
    reached: list[str] = []

    class Undead(Agent):
        name = "undead"

        async def play(self, run: Run) -> None:
            with suppress(asyncio.CancelledError):
                await wait(FOREVER)
            try:
                await run.sample()
            except RolloutEnded as over:
                reached.append(repr(over.end))
            raise LookupError

    world = new_world(Undead())
    rollout = world.start()
    await asyncio.sleep(1)
    world.roster.cancel(Selection(ME), "not needed")
    outcome = await outcome_of(rollout)
    await asyncio.sleep(1)
    assert outcome.end == Cancellation("not needed")
    assert reached == ["Cancellation(reason='not needed')"]
    assert world.script(rollout).asks == []
    assert world.roster.running == 0


async def test_an_agent_that_swallows_its_end_and_asks_again_lets_others_run(new_world: type[RuntimeHarness]) -> None:
    beats: list[int] = []

    class Deaf(Agent):
        name = "deaf"

        async def play(self, run: Run) -> None:
            for _ in range(100):  # a similar `while True` would never end, not even on cancellation
                try:
                    await run.sample()
                except BaseException:
                    beats.append(beat)

    rollout = new_world(Deaf()).start(limits=Limits(turns=1))
    beat = 0
    while rollout.outcome is None:
        beat += 1
        await asyncio.sleep(0.001)
    assert beats[0] < beats[-1]


async def test_an_agent_that_swallows_its_end_and_sleeps_has_ended_all_the_same(
    new_world: type[RuntimeHarness],
) -> None:
    class Sleepy(Agent):
        name = "sleepy"

        async def play(self, run: Run) -> None:
            try:
                await super().play(run)
                await run.sample()
            except RolloutEnded:
                await wait(FOREVER)

    outcome = await outcome_of(new_world(Sleepy()).start(limits=Limits(turns=1, seconds=60)))
    assert outcome.end == Stop("max_turns")


class Dawdling(Agent):
    """Keep running when its end is decided."""

    name = "dawdling"

    async def play(self, run: Run) -> None:
        try:
            await super().play(run)
            await run.sample()
        except RolloutEnded:
            await wait(FOREVER)


@pytest.mark.parametrize("how", ["cancel", "time"])
async def test_an_agent_that_dawdles_after_its_end_does_not_hold_up_another_end(
    new_world: type[RuntimeHarness], how: str
) -> None:
    world = new_world(Dawdling())
    rollout = world.start(Say("8", seconds=1), limits=Limits(turns=1, seconds=2 if how == "time" else 60))
    await asyncio.sleep(2)
    if how == "cancel":
        world.roster.cancel(Selection(ME), "not needed")
    outcome = await outcome_of(rollout)
    assert outcome.metrics.total_ms == pytest.approx(2000)


async def test_a_drain_leaves_no_rollout_without_an_outcome(new_world: type[RuntimeHarness]) -> None:
    world = new_world(Dawdling())
    rollout = world.start(Say("8", seconds=1), limits=Limits(turns=1))
    await asyncio.sleep(1)
    await world.roster.drain(0)
    assert rollout.outcome is not None

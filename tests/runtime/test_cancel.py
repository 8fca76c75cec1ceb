"""Cancelling and detaching, in every state of a rollout."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rollout_server import Agent, Run
from rollout_server.core.outcome import Cancellation, Stop
from rollout_server.core.record import Asked, Ended, ToolReturned, ToolStarted
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import Rollout, RolloutState
from rollout_server.runtime.start_request import Capacity

from tests.runtime.test_stopping import STALLS, Stalling
from tests.support.runtime_harness import FOREVER, ME, Looping, RuntimeHarness, Say, call, outcome_of

ALL = Selection(ME)
BLOCKED = Say(seconds=FOREVER)


async def stalled(world: RuntimeHarness, where: str, **spec_fields: Any) -> Rollout:
    """A rollout that stops progressing at `where`."""
    rollout = world.start(STALLS[where], metadata_json=f'{{"where": "{where}"}}', **spec_fields)
    await asyncio.sleep(1)
    assert rollout.state is RolloutState.RUNNING
    return rollout


@pytest.mark.parametrize("where", STALLS)
async def test_a_running_rollout_is_cancelled_wherever_it_is(new_world: type[RuntimeHarness], where: str) -> None:
    world = new_world(Stalling())
    rollout = await stalled(world, where)
    assert world.roster.cancel(ALL, "not needed") == [rollout.uid]
    outcome = await outcome_of(rollout)
    assert outcome.end == Cancellation("not needed")
    assert outcome.reward_result.reward is None
    assert rollout.state is RolloutState.FINISHED
    await asyncio.sleep(1)
    assert world.roster.running == 0


async def test_an_open_question_and_open_calls_stay_open_in_the_log(new_world: type[RuntimeHarness]) -> None:
    world = new_world(Stalling())
    asking, calling = await stalled(world, "sample"), await stalled(world, "tools")
    world.roster.cancel(ALL, "")
    await outcome_of(asking)
    await outcome_of(calling)
    assert [type(entry.record) for entry in asking.log.entries][-2:] == [Asked, Ended]
    assert [type(entry.record) for entry in calling.log.entries][-2:] == [ToolStarted, Ended]
    assert not [entry for entry in calling.log.entries if isinstance(entry.record, ToolReturned)]


async def test_calls_that_returned_before_the_end_are_counted(new_world: type[RuntimeHarness]) -> None:
    world = new_world(Stalling())
    rollout = world.start(Say("", (call("nothing"), call("stall"))), metadata_json='{"where": "tools"}')
    await asyncio.sleep(1)
    world.roster.cancel(ALL, "")
    outcome = await outcome_of(rollout)
    assert (outcome.metrics.tool_calls, outcome.metrics.tool_failures) == (1, 1)


async def test_a_queued_rollout_ends_at_once_and_never_runs(new_world: type[RuntimeHarness]) -> None:
    world = new_world(Looping(), capacity=Capacity(running=1))
    first, second, third = world.start(BLOCKED), world.start(), world.start()
    await asyncio.sleep(5)
    assert world.roster.cancel(Selection(ME, uids=(second.uid,)), "not needed") == [second.uid]
    outcome = await outcome_of(second)
    assert outcome.end == Cancellation("not needed")
    assert outcome.metrics.queued_ms == pytest.approx(5000)
    assert outcome.metrics.total_ms == 0.0
    assert (world.roster.running, world.roster.queued, world.roster.totals.finished) == (1, 1, 1)
    world.roster.cancel(Selection(ME, uids=(first.uid,)), "")
    assert (await outcome_of(third)).end == Stop("stop")
    assert world.opened == [first.spec.rollout_id, third.spec.rollout_id]


async def test_a_rollout_that_is_cancelled_while_its_place_becomes_free_ends_once(
    new_world: type[RuntimeHarness],
) -> None:
    world = new_world(Looping(), capacity=Capacity(running=1))
    first, second = world.start(Say("8", seconds=10)), world.start(BLOCKED)
    async for entry in first.log.follow(0):
        if isinstance(entry.record, Ended):
            world.roster.cancel(ALL, "not needed")
    assert (await outcome_of(second)).end == Cancellation("not needed")
    await asyncio.sleep(1)
    assert (world.roster.running, world.roster.queued, world.roster.totals.finished) == (0, 0, 2)


async def test_the_first_wish_to_end_counts(new_world: type[RuntimeHarness]) -> None:
    world = new_world(Looping())
    rollout = world.start(BLOCKED)
    await asyncio.sleep(1)
    assert world.roster.cancel(ALL, "first") == [rollout.uid]
    assert world.roster.cancel(ALL, "second") == [rollout.uid]
    assert (await outcome_of(rollout)).end == Cancellation("first")
    assert world.roster.cancel(ALL, "third") == []
    assert (await outcome_of(rollout)).end == Cancellation("first")


async def test_a_cancel_reaches_the_callers_own_and_the_selected_ones_only(new_world: type[RuntimeHarness]) -> None:
    world = new_world(Looping())
    mine = [
        world.start(BLOCKED, group_id=group, labels={"run": run}) for group, run in (("g", "1"), ("g", "2"), ("h", "1"))
    ]
    other = world.start(BLOCKED, caller="other", group_id="g")
    await asyncio.sleep(1)
    assert world.roster.cancel(Selection(ME, group_id="g", labels={"run": "1"}), "") == [mine[0].uid]
    assert world.roster.cancel(Selection(ME, uids=(other.uid,)), "") == []
    assert set(world.roster.cancel(ALL, "")) == {rollout.uid for rollout in mine}
    await asyncio.sleep(1)
    assert other.state is RolloutState.RUNNING


async def test_run_says_that_somebody_wants_it_to_end(new_world: type[RuntimeHarness]) -> None:
    seen: list[bool] = []

    class Watching(Agent):
        name = "watching"

        async def play(self, run: Run) -> None:
            seen.append(run.cancelled)
            try:
                await run.sample()
            finally:
                seen.append(run.cancelled)

    world = new_world(Watching())
    rollout = world.start(BLOCKED)
    await asyncio.sleep(1)
    world.roster.cancel(ALL, "")
    await outcome_of(rollout)
    await asyncio.sleep(1)
    assert seen == [False, True]


async def detached_after(world: RuntimeHarness, rollout: Rollout) -> float:
    """Seconds from now until the rollout is cancelled because no client is attached."""
    before = asyncio.get_running_loop().time()
    outcome = await outcome_of(rollout)
    assert outcome.end == Cancellation("detached")
    return asyncio.get_running_loop().time() - before


@pytest.mark.parametrize("grace", [0, 10, 3600])
async def test_a_rollout_that_nobody_listens_to_is_cancelled_after_its_grace(
    new_world: type[RuntimeHarness], grace: float
) -> None:
    world = new_world(Looping())
    assert await detached_after(world, world.start(BLOCKED, cancel_after_detach=grace)) == pytest.approx(grace)


async def test_without_a_grace_a_rollout_runs_on_alone(new_world: type[RuntimeHarness]) -> None:
    world = new_world(Looping())
    rollout = world.start(Say("8", seconds=86_000))
    assert (await outcome_of(rollout)).end == Stop("stop")


async def test_listening_keeps_a_rollout_alive_and_coming_back_in_time_does_too(
    new_world: type[RuntimeHarness],
) -> None:
    world = new_world(Looping())
    rollout = world.start(BLOCKED, cancel_after_detach=10)
    for _ in range(3):
        with rollout.attached():
            await asyncio.sleep(100)
        await asyncio.sleep(9)
    assert rollout.state is RolloutState.RUNNING
    assert await detached_after(world, rollout) == pytest.approx(1)


async def test_the_grace_begins_when_the_last_one_leaves(new_world: type[RuntimeHarness]) -> None:
    world = new_world(Looping())
    rollout = world.start(BLOCKED, cancel_after_detach=10)
    with rollout.attached():
        with rollout.attached():
            await asyncio.sleep(100)
        await asyncio.sleep(100)
    assert await detached_after(world, rollout) == pytest.approx(10)


async def test_a_queued_rollout_is_cancelled_after_its_grace(new_world: type[RuntimeHarness]) -> None:
    world = new_world(Looping(), capacity=Capacity(running=1))
    world.start(BLOCKED)
    queued = world.start(cancel_after_detach=10)
    assert await detached_after(world, queued) == pytest.approx(10)
    assert world.roster.queued == 0


async def test_a_finished_rollout_stays_as_it_is_when_listeners_come_and_go(new_world: type[RuntimeHarness]) -> None:
    world = new_world(Looping())
    rollout = world.start(cancel_after_detach=10)
    with rollout.attached():
        outcome = await outcome_of(rollout)
    await asyncio.sleep(100)
    with rollout.attached():
        await asyncio.sleep(100)
    assert await outcome_of(rollout) == outcome
    assert outcome.end == Stop("stop")

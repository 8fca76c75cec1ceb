"""Draining: new rollouts are refused, running ones may finish within the grace time, the rest end as interrupted."""

from __future__ import annotations

import asyncio

import pytest
from rollout_server.core.error import Draining
from rollout_server.core.outcome import Cancellation, Category, Failure, Outcome, Stop
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.start_request import Capacity

from tests.runtime.test_ends import Stubborn
from tests.support.runtime_harness import FOREVER, ME, Looping, RuntimeHarness, Say, check_log, outcome_of


def assert_interrupted(outcome: Outcome) -> None:
    assert isinstance(outcome.end, Failure)
    assert outcome.end.category is Category.INTERRUPTED


async def test_a_server_with_nothing_to_do_drains_at_once(new_world: type[RuntimeHarness]) -> None:
    before = asyncio.get_running_loop().time()
    await new_world().roster.drain(60)
    assert asyncio.get_running_loop().time() == before


async def test_what_runs_finishes_in_its_grace_and_the_drain_ends_with_it(new_world: type[RuntimeHarness]) -> None:
    world = new_world()
    rollouts = [world.start(Say("8", seconds=seconds)) for seconds in (1, 30)]
    before = asyncio.get_running_loop().time()
    await world.roster.drain(60)
    assert asyncio.get_running_loop().time() - before == pytest.approx(30)
    assert [check_log(rollout).end for rollout in rollouts] == [Stop("stop")] * 2


async def test_what_does_not_finish_in_its_grace_is_interrupted(new_world: type[RuntimeHarness]) -> None:
    world = new_world()
    quick, slow = world.start(Say("8", seconds=1)), world.start(Say("8", seconds=FOREVER))
    await world.roster.drain(60)
    assert check_log(quick).end == Stop("stop")
    outcome = check_log(slow)
    assert_interrupted(outcome)
    assert outcome.metrics.total_ms == pytest.approx(60_000)
    assert outcome.end.turn == 1  # type: ignore[union-attr]
    assert (world.roster.running, world.roster.queued) == (0, 0)


async def test_those_who_wait_run_while_there_is_time_and_are_interrupted_after(
    new_world: type[RuntimeHarness],
) -> None:
    world = new_world(capacity=Capacity(running=1))
    rollouts = [world.start(Say("8", seconds=10)) for _ in range(4)]
    await world.roster.drain(25)
    outcomes = [check_log(rollout) for rollout in rollouts]
    assert [outcome.end for outcome in outcomes[:2]] == [Stop("stop")] * 2
    for outcome in outcomes[2:]:
        assert_interrupted(outcome)
    assert world.opened == ["r1", "r2", "r3"]
    assert (world.roster.running, world.roster.queued) == (0, 0)


async def test_a_draining_server_refuses_the_new_and_still_cancels(new_world: type[RuntimeHarness]) -> None:
    world = new_world()
    rollout = world.start(Say(seconds=FOREVER))
    drain = asyncio.create_task(world.roster.drain(60))
    await asyncio.sleep(1)
    with pytest.raises(Draining):
        world.start()
    world.roster.cancel(Selection(ME), "not needed")
    await drain
    assert check_log(rollout).end == Cancellation("not needed")


async def test_watchers_see_the_end(new_world: type[RuntimeHarness]) -> None:
    world = new_world()
    watchers = [
        asyncio.create_task(outcome_of(world.start(Say(seconds=FOREVER), cancel_after_detach=3600))) for _ in range(3)
    ]
    await world.roster.drain(0)
    for watcher in watchers:
        assert_interrupted(await watcher)


async def test_agents_that_do_not_give_way_do_not_hold_the_server(new_world: type[RuntimeHarness]) -> None:
    agent = Stubborn()
    world = new_world(agent, Looping(), capacity=Capacity(running=1))
    stubborn, waiting = world.start(), world.start(agent="looping")
    await asyncio.sleep(1)
    await world.roster.drain(0)
    assert_interrupted(check_log(stubborn))
    assert_interrupted(check_log(waiting))
    agent.free.set()

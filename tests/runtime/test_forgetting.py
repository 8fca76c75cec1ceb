"""The registry forgets finished rollouts and releases their memory."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from rollout_server import Limits
from rollout_server.core.error import NotFound
from rollout_server.core.outcome import Cancellation, Stop
from rollout_server.runtime.ports import Clock
from rollout_server.runtime.registry.dependencies import RegistryDependencies
from rollout_server.runtime.registry.registry import RolloutRegistry
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import RolloutState
from rollout_server.runtime.start_request import Capacity

from tests.runtime.test_roster import ALL, BLOCKED
from tests.support.runtime_harness import (
    EPOCH,
    FOREVER,
    ME,
    Looping,
    RuntimeHarness,
    Say,
    Script,
    a_wish,
    outcome_of,
)


async def test_finished_rollouts_are_forgotten_by_age(new_world: type[RuntimeHarness]) -> None:
    world = new_world(capacity=Capacity(finished_seconds=60))
    early, running = world.start(), world.start(Say("8", seconds=100))
    await outcome_of(early)
    await asyncio.sleep(59)
    world.roster.forget()
    assert world.roster.get(early.uid, ME) is early
    await asyncio.sleep(2)
    world.roster.forget()
    with pytest.raises(NotFound):
        world.roster.get(early.uid, ME)
    assert [rollout for _, rollout in world.roster.select(ALL)] == [running]
    assert (await outcome_of(running)).end == Stop("stop")


async def test_finished_rollouts_are_forgotten_by_number_those_that_finished_first(
    new_world: type[RuntimeHarness],
) -> None:
    world = new_world(capacity=Capacity(finished=2))
    slow, *rest = [world.start(Say("8", seconds=10 - second)) for second in range(4)]
    await outcome_of(slow)
    await asyncio.sleep(1)
    assert [rollout for _, rollout in world.roster.select(ALL)] == [rest[0], slow]
    assert world.roster.totals.finished == 4


async def test_a_forgotten_rollout_is_let_go_however_long_its_time_limit_was() -> None:
    world = RuntimeHarness(capacity=Capacity(finished=0))
    await outcome_of(world.start(limits=Limits(seconds=80_000), cancel_after_detach=70_000))
    await asyncio.sleep(1)
    world.scripts.clear()  # a sampler's request can still write notes to its rollout
    rollout = weakref.ref(world.rollouts.pop())
    gc.collect()
    assert rollout() is None


async def test_a_forgotten_id_starts_anew(new_world: type[RuntimeHarness]) -> None:
    world = new_world(capacity=Capacity(finished=0))
    rollout, _ = world.wish(a_wish("key"))
    outcome = await outcome_of(rollout)
    await asyncio.sleep(1)
    again, found = world.wish(a_wish("key", priority=1))
    assert (found, again is rollout) == (False, False)
    assert outcome.end == Stop("stop")


async def test_those_that_were_cancelled_in_the_queue_are_forgotten_too(new_world: type[RuntimeHarness]) -> None:
    world = new_world(capacity=Capacity(running=1, finished=1))
    world.start(BLOCKED)
    queued = [world.start() for _ in range(3)]
    await asyncio.sleep(1)
    world.roster.cancel(Selection(ME, states=(RolloutState.QUEUED,)), "")
    for rollout in queued:
        assert (await outcome_of(rollout)).end == Cancellation("")
    assert len([*world.roster.select(ALL)]) == 2


async def test_finished_rollouts_are_bounded_in_bytes_too(new_world: type[RuntimeHarness]) -> None:
    """The oldest are forgotten first. One that exceeds the whole limit is forgotten at once."""
    small = new_world()
    size = await size_of_one(small)
    world = new_world(capacity=Capacity(finished_bytes=2 * size))
    for _ in range(4):
        await outcome_of(world.start())
        await asyncio.sleep(1)
    assert len([*world.roster.select(Selection(ME))]) == 2
    none = new_world(capacity=Capacity(finished_bytes=size - 1))
    await outcome_of(none.start())
    await asyncio.sleep(1)
    assert [*none.roster.select(Selection(ME))] == []


async def size_of_one(world: RuntimeHarness) -> int:
    rollout = world.start()
    await outcome_of(rollout)
    return rollout.machine.size


async def test_a_rollout_that_was_cancelled_in_the_queue_and_forgotten_is_let_go() -> None:
    world = RuntimeHarness(capacity=Capacity(running=1, finished=0))
    world.start(Say(seconds=FOREVER))
    world.start()
    queued = weakref.ref(world.rollouts.pop())
    world.roster.cancel(Selection(ME, rollout_ids=("r2",)), "")
    await asyncio.sleep(1)
    gc.collect()
    kept = queued() is not None
    await world.roster.drain(0)
    assert not kept


async def test_what_finished_at_the_beginning_of_time_is_forgotten_too() -> None:
    now = [0.0]
    roster = RolloutRegistry(
        [Looping()],
        lambda uid, spec, tools: Script(),
        lambda: "u",
        capacity=Capacity(finished_seconds=60),
        dependencies=RegistryDependencies(clock=Clock(lambda: now[0], lambda: now[0])),
    )
    await outcome_of(roster.start(roster.admission.admit(a_wish()))[0])
    await asyncio.sleep(1)
    now[0] = EPOCH
    roster.forget()
    assert [*roster.select(Selection(ME))] == []

"""Admission by memory and by caller: one caller can neither exhaust the server nor starve the others."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from rollout_server.core.error import Busy
from rollout_server.core.limits import Limits
from rollout_server.core.message import Message
from rollout_server.core.outcome import Cancellation, Stop
from rollout_server.core.spec import Sampling
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import Rollout, RolloutState
from rollout_server.runtime.start_request import Caller, Capacity, Quota, StartRequest

from tests.runtime.test_groups import Groups
from tests.support.runtime_harness import ME, Looping, RuntimeHarness, Say, a_spec, call, outcome_of

KIB = 2**10


def sized(kib: int) -> Message:
    """A message that counts as this many KiB; stored text is counted twice."""
    return Message.write({"role": "user", "content": "x" * (kib * KIB // 2 - len('{"role": "user", "content": ""}'))})


def refused(world: RuntimeHarness, caller: str = "me", **fields: object) -> Busy:
    with pytest.raises(Busy) as caught:
        world.start(caller=caller, **fields)
    assert caught.value.retry_after > 0
    return caught.value


async def test_what_rollouts_hold_is_counted_until_they_are_remembered(new_world: type[RuntimeHarness]) -> None:
    world = new_world(capacity=Capacity(running=2, active_bytes=64 * KIB))
    rollouts = [world.start(Say("8", seconds=10), messages=(sized(16),)) for _ in range(4)]
    assert world.roster.active_bytes == 64 * KIB
    assert refused(world, messages=(sized(16),)).reason == "TOO_MANY_BYTES"
    rollouts[3].ending.request(Cancellation("not needed"))  # a waiting one
    await outcome_of(rollouts[3])
    await asyncio.sleep(0)
    rollouts.append(world.start(Say("8", seconds=10), messages=(sized(16),)))
    for rollout in rollouts:
        await outcome_of(rollout)
    await asyncio.sleep(1)
    assert world.roster.active_bytes == 0


@pytest.mark.parametrize(
    "attached",
    [
        {"metadata_json": f'{{"a": "{"x" * 16 * KIB}"}}'},
        {"source_json": f'{{"a": "{"é" * 8 * KIB}"}}'},
        {"sampling": Sampling(extra_json=f'{{"a": "{"x" * 16 * KIB}"}}')},
    ],
)
async def test_what_a_request_has_beside_its_messages_counts(
    new_world: type[RuntimeHarness], attached: dict[str, Any]
) -> None:
    world = new_world(capacity=Capacity(active_bytes=56 * KIB, finished_bytes=24 * KIB))
    rollouts = [world.start(Say("8", seconds=10), **attached) for _ in range(3)]
    assert refused(world, **attached).reason == "TOO_MANY_BYTES"
    for rollout in rollouts:
        await outcome_of(rollout)
    await asyncio.sleep(1)
    assert world.roster.active_bytes == 0
    assert len([*world.roster.select(Selection(ME))]) == 1  # only one fits into the memory of finished rollouts


async def test_what_running_rollouts_gather_counts_as_well(new_world: type[RuntimeHarness]) -> None:
    world = new_world(capacity=Capacity(active_bytes=64 * KIB))
    growing = world.start(Say("x" * 64 * KIB, (call("add", a=1, b=2),)), Say("8", seconds=100))
    await asyncio.sleep(10)
    assert growing.state is RolloutState.RUNNING
    assert world.roster.active_bytes >= 2 * 64 * KIB
    assert refused(world).reason == "TOO_MANY_BYTES"


async def test_what_is_larger_than_the_limit_is_let_in_alone(new_world: type[RuntimeHarness]) -> None:
    world = new_world(capacity=Capacity(active_bytes=KIB, per_caller=Quota(bytes=KIB)))
    large = world.start(messages=(sized(16),))
    refused(world, messages=(sized(16),))
    await outcome_of(large)
    await asyncio.sleep(1)
    world.start(messages=(sized(16),))


async def test_a_group_is_taken_whole_or_not_at_all() -> None:
    world = Groups(capacity=Capacity(active_bytes=64 * KIB))
    wishes = [StartRequest(a_spec(rollout_id=f"g{n}", messages=(sized(16),)), "me") for n in range(5)]
    with pytest.raises(Busy):
        await world.begin([*wishes[:1], *wishes])
    assert world.roster.active_bytes == 0
    await world.begin(wishes[:3])
    with pytest.raises(Busy):
        await world.begin(wishes[3:])
    assert world.roster.active_bytes == 48 * KIB
    await world.close()


async def test_what_was_cancelled_while_it_waited_is_not_kept_in_line(new_world: type[RuntimeHarness]) -> None:
    world = new_world(capacity=Capacity(running=1))
    running = world.start(Say("8", seconds=10))
    waiting = [world.start(priority=n % 3) for n in range(60)]
    for rollout in waiting[5:]:
        rollout.ending.request(Cancellation("not needed"))
        await outcome_of(rollout)
    await asyncio.sleep(0)
    assert len(world.roster._queue._uses["me"].line) <= 10
    await outcome_of(running)
    for rollout in waiting[:5]:
        await outcome_of(rollout)
    # By priority, then in order of arrival.
    assert world.opened == [each.spec.rollout_id for each in (running, *(waiting[n] for n in (2, 1, 4, 0, 3)))]


async def test_a_free_slot_goes_to_the_caller_with_the_fewest_that_run(new_world: type[RuntimeHarness]) -> None:
    world = new_world(capacity=Capacity(running=4))
    first = [world.start(Say("8", seconds=10 + n), caller="many", priority=9) for n in range(20)]
    few = [world.start(Say("8", seconds=10), caller="few") for _ in range(3)]
    await asyncio.sleep(12.5)  # three slots have become free
    assert [rollout.state for rollout in few] == [RolloutState.RUNNING] * 2 + [RolloutState.QUEUED]
    assert sum(rollout.state is RolloutState.RUNNING for rollout in first) == 2


async def test_one_caller_may_run_fewer_than_there_are_slots(new_world: type[RuntimeHarness]) -> None:
    world = new_world(capacity=Capacity(running=4, per_caller=Quota(running=2, queued=1)))
    mine = [world.start(Say("8", seconds=seconds)) for seconds in (10, 30, 30)]
    assert [rollout.state for rollout in mine] == [RolloutState.RUNNING] * 2 + [RolloutState.QUEUED]
    assert refused(world).reason == "CALLER_QUOTA"
    assert world.start(caller="other").state is RolloutState.RUNNING
    await outcome_of(mine[0])
    await asyncio.sleep(1)
    assert mine[2].state is RolloutState.RUNNING
    assert world.start().state is RolloutState.QUEUED


async def test_the_bytes_of_one_caller_are_limited(new_world: type[RuntimeHarness]) -> None:
    world = new_world(capacity=Capacity(per_caller=Quota(bytes=32 * KIB)))
    world.start(messages=(sized(16),)), world.start(messages=(sized(16),))
    assert refused(world, messages=(sized(16),)).reason == "CALLER_QUOTA"
    world.start(caller="other", messages=(sized(16),))


async def test_starts_are_limited_in_a_minute_and_come_back_with_time(new_world: type[RuntimeHarness]) -> None:
    world = new_world(capacity=Capacity(per_caller=Quota(starts_per_minute=60)))
    for _ in range(60):
        world.start()
    busy = refused(world)
    assert (busy.reason, busy.retry_after) == ("CALLER_QUOTA", pytest.approx(1))
    world.start(caller="other")
    await asyncio.sleep(10)
    for _ in range(10):
        world.start()
    refused(world)
    await asyncio.sleep(3600)  # unused starts do not accumulate beyond one minute
    for _ in range(60):
        world.start()
    refused(world)


def test_only_among_several_callers_a_share_is_left_to_others() -> None:
    assert Capacity().quota() == Quota()
    shared = Capacity(queued=100, active_bytes=1000, shared=True)
    assert shared.quota() == Quota(queued=90, bytes=900)
    own = Quota(running=1, queued=100, bytes=1000, starts_per_minute=5)
    assert Capacity(queued=100, active_bytes=1000, shared=True, per_caller=own).quota() == own


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_happens_the_counts_come_back_to_nothing(new_world: type[RuntimeHarness], seed: int) -> None:
    chance = random.Random(seed)
    quota = Quota(running=2, queued=3, bytes=200 * KIB)
    world = new_world(capacity=Capacity(running=5, queued=6, active_bytes=300 * KIB, per_caller=quota))
    taken: list[Rollout] = []
    for _ in range(200):
        caller = chance.choice("abc")
        try:
            size = sized(chance.choice([1, 20, 90]))
            taken.append(world.start(Say("8", seconds=chance.random() * 20), caller=caller, messages=(size,)))
        except Busy:
            pass
        if chance.random() < 0.3:
            world.roster.cancel(Selection(Caller(caller)), "not needed")
        await asyncio.sleep(chance.random() * 5)
        states = [(rollout.caller, rollout.state) for rollout in taken]
        for name in "abc":
            assert states.count((name, RolloutState.RUNNING)) <= 2
            assert states.count((name, RolloutState.QUEUED)) <= 5
        assert world.roster.active_bytes <= 300 * KIB + 64 * KIB  # completions are counted on top
    for rollout in taken:
        await outcome_of(rollout)
    await asyncio.sleep(1)
    assert (world.roster.running, world.roster.queued, world.roster.active_bytes) == (0, 0, 0)


async def test_a_loop_that_nobody_limits_ends_after_256_turns(new_world: type[RuntimeHarness]) -> None:
    world = new_world(Looping())
    endless = [Say("", (call("add", f"c{turn}", a=1, b=2),)) for turn in range(300)]
    outcome = await outcome_of(world.start(*endless, limits=Limits()))
    assert outcome.end == Stop("max_turns")
    assert outcome.metrics.turns == 256
    assert world.start(limits=Limits(turns=1000)).spec.limits.turns == 1000

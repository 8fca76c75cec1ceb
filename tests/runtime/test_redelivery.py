"""Sending outcomes again: what a receiver gets, and what becomes of the rollout meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from rollout_server.core.error import Draining, NotFound
from rollout_server.runtime.outcome_delivery import Delivery, DeliveryRefused, DeliveryState
from rollout_server.runtime.ports import Credentials
from rollout_server.runtime.registry.dependencies import DeliveryRetryPolicy
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.start_request import Caller, Capacity

from tests.runtime.outcome_receivers import DOWN, YES, Receiver, owing, until
from tests.runtime.test_ends import Stubborn
from tests.runtime.test_journal import restored
from tests.support.journal import KeptJournal
from tests.support.runtime_harness import FOREVER, ME, RuntimeHarness, Say, outcome_of

NO = DeliveryRefused("no")
ONCE = DeliveryRetryPolicy(retries=0)


def delivery_of(rollout: Rollout) -> Delivery:
    assert rollout.delivery is not None
    return rollout.delivery


async def given_up(world: RuntimeHarness, **fields: object) -> Rollout:
    """A rollout whose delivery was refused or has expired."""
    rollout, _ = world.wish(owing(world, **fields))  # type: ignore[arg-type]
    await until(lambda: rollout.undelivered)
    await asyncio.sleep(1)
    return rollout


@pytest.mark.parametrize("receipt", [NO, DOWN, LookupError()])
async def test_a_delivery_that_was_given_up_begins_again(
    new_world: type[RuntimeHarness], receipt: DeliveryRefused | Exception
) -> None:
    receiver = Receiver(receipt, DOWN, YES)
    world = new_world(reporter=receiver, patience=DeliveryRetryPolicy(retries=0 if receipt is DOWN else None))
    rollout = await given_up(world, key="hunter2")
    assert world.roster.redeliver(Selection(ME)) == [rollout.uid]
    assert (delivery_of(rollout).state, world.roster.owed) == (DeliveryState.PENDING, 1)
    if receipt is DOWN:
        await until(lambda: rollout.undelivered)
        await asyncio.sleep(1)
        assert world.roster.redeliver(Selection(ME, uids=(rollout.uid,))) == [rollout.uid]
    await until(lambda: not rollout.owes)
    await asyncio.sleep(1)
    assert (delivery_of(rollout).state, delivery_of(rollout).attempts) == (DeliveryState.ACKNOWLEDGED, 3)
    assert (len({(each.key, each.body) for each in receiver.parcels}), receiver.packed) == (1, 1)
    assert receiver.credentials == ["hunter2"] * 3
    assert rollout.credentials == Credentials()
    assert world.roster.redeliver(Selection(ME)) == []
    assert world.roster.owed == 0


async def test_an_outcome_that_could_not_be_serialized_is_serialized_then(new_world: type[RuntimeHarness]) -> None:
    receiver = Receiver(YES)
    receiver.unpackable = ValueError("a bug")
    world = new_world(reporter=receiver)
    rollout = await given_up(world)
    assert delivery_of(rollout).attempts == 0
    receiver.unpackable = None
    world.roster.redeliver(Selection(ME))
    await until(lambda: not rollout.owes)
    assert (delivery_of(rollout).state, delivery_of(rollout).attempts) == (DeliveryState.ACKNOWLEDGED, 1)


async def test_it_has_a_new_time_limit(new_world: type[RuntimeHarness]) -> None:
    receiver = Receiver(DOWN)
    world = new_world(reporter=receiver, patience=DeliveryRetryPolicy(expiry=100, first=10, most=10))
    rollout = await given_up(world)
    first = delivery_of(rollout)
    await asyncio.sleep(1000)
    world.roster.redeliver(Selection(ME))
    await until(lambda: not rollout.owes)
    second = delivery_of(rollout)
    assert (first.state, second.state) == (DeliveryState.EXPIRED, DeliveryState.EXPIRED)
    assert second.attempts == 2 * first.attempts == len(receiver.parcels)


async def test_a_delivery_that_waits_makes_its_next_attempt_at_once(new_world: type[RuntimeHarness]) -> None:
    receiver = Receiver(DOWN, YES)
    world = new_world(reporter=receiver, patience=DeliveryRetryPolicy(first=3000, most=3000))
    rollout, _ = world.wish(owing(world))
    await until(lambda: delivery_of(rollout).next_attempt is not None if rollout.delivery else False)
    before = asyncio.get_running_loop().time()
    assert world.roster.redeliver(Selection(ME)) == [rollout.uid]
    assert world.roster.redeliver(Selection(ME)) == [rollout.uid], "twice in the same moment is once"
    await until(lambda: not rollout.owes)
    assert asyncio.get_running_loop().time() - before < 10
    await asyncio.sleep(10_000)
    assert (delivery_of(rollout).state, len(receiver.parcels)) == (DeliveryState.ACKNOWLEDGED, 2)


async def test_an_attempt_that_is_being_made_is_not_doubled(new_world: type[RuntimeHarness]) -> None:
    receiver = Receiver(YES, seconds=50)
    world = new_world(reporter=receiver)
    rollout, _ = world.wish(owing(world))
    await until(lambda: len(receiver.parcels) == 1)
    assert world.roster.redeliver(Selection(ME)) == [rollout.uid]
    await asyncio.sleep(1000)
    assert (delivery_of(rollout).state, len(receiver.parcels)) == (DeliveryState.ACKNOWLEDGED, 1)


async def test_it_may_begin_in_the_moment_in_which_the_earlier_one_ends(new_world: type[RuntimeHarness]) -> None:
    receiver = Receiver(NO, YES)
    world = new_world(reporter=receiver)
    rollout, _ = world.wish(owing(world))
    again: list[str] = []
    end = rollout.update_delivery

    def on_change(delivery: Delivery) -> None:
        end(delivery)
        if delivery.state is DeliveryState.REFUSED:
            asyncio.get_running_loop().call_soon(lambda: again.extend(world.roster.redeliver(Selection(ME))))

    rollout.update_delivery = on_change  # type: ignore[method-assign]
    await until(lambda: len(receiver.parcels) == 2)
    await asyncio.sleep(10)
    assert again == [rollout.uid]
    assert (delivery_of(rollout).state, world.roster.owed) == (DeliveryState.ACKNOWLEDGED, 0)


async def test_what_has_no_outcome_or_no_receiver_does_not_change(new_world: type[RuntimeHarness]) -> None:
    receiver = Receiver(YES)
    world = new_world(reporter=receiver)
    unsent, running = world.start(), world.start(Say(seconds=FOREVER))
    await outcome_of(unsent)
    await asyncio.sleep(1)
    assert world.roster.redeliver(Selection(ME)) == []
    assert (unsent.delivery, running.delivery, receiver.parcels) == (None, None, [])


async def test_only_the_selected_ones_of_this_caller_are_sent(new_world: type[RuntimeHarness]) -> None:
    receiver = Receiver(NO, NO, NO, YES)
    world = new_world(reporter=receiver)
    rollouts = [await given_up(world, rollout_id=f"r{number}") for number in range(3)]
    assert world.roster.redeliver(Selection(Caller("somebody else"))) == []
    assert world.roster.redeliver(Selection(ME, delivery_states=(DeliveryState.EXPIRED,))) == []
    assert world.roster.redeliver(Selection(ME, rollout_ids=("r1",))) == [rollouts[1].uid]
    await until(lambda: not rollouts[1].owes)
    states = [delivery_of(rollout).state for rollout in rollouts]
    assert states == [DeliveryState.REFUSED, DeliveryState.ACKNOWLEDGED, DeliveryState.REFUSED]


async def test_it_is_not_dropped_before_the_delivery_is_over_and_counts_as_active(
    new_world: type[RuntimeHarness],
) -> None:
    receiver = Receiver(NO, DOWN)
    world = new_world(reporter=receiver, capacity=Capacity(finished=10, finished_seconds=100))
    rollout = await given_up(world)
    assert world.roster.active_bytes == 0
    world.roster.redeliver(Selection(ME))
    assert world.roster.active_bytes == rollout.machine.size
    await asyncio.sleep(1000)
    world.roster.forget()
    assert world.roster.get(rollout.uid, ME) is rollout
    await until(lambda: not rollout.owes)
    await asyncio.sleep(1)
    assert world.roster.active_bytes == 0
    world.roster.forget()
    assert world.roster.get(rollout.uid, ME) is rollout, "it is kept as long as one that has just ended"
    await asyncio.sleep(101)
    world.roster.forget()
    with pytest.raises(NotFound):
        world.roster.get(rollout.uid, ME)


async def test_an_agent_that_does_not_give_way_changes_nothing(new_world: type[RuntimeHarness]) -> None:
    agent, receiver = Stubborn(), Receiver(NO, YES)
    world = new_world(agent, reporter=receiver)
    rollout, _ = world.wish(owing(world))
    await asyncio.sleep(1)
    world.roster.cancel(Selection(ME), "")
    await until(lambda: rollout.undelivered)
    world.roster.redeliver(Selection(ME))
    await until(lambda: not rollout.owes)
    agent.free.set()
    await asyncio.sleep(1000)
    assert (world.roster.totals.finished, world.roster.active_bytes) == (1, 0)
    assert world.roster.get(rollout.uid, ME) is rollout


async def test_a_server_that_stops_begins_no_delivery(new_world: type[RuntimeHarness]) -> None:
    world = new_world(reporter=Receiver(NO))
    rollout = await given_up(world)
    await world.roster.drain(0)
    with pytest.raises(Draining):
        world.roster.redeliver(Selection(ME))
    assert delivery_of(rollout).state is DeliveryState.REFUSED


@pytest.mark.parametrize("receipt", [NO, DOWN])
async def test_after_a_restart_it_sends_the_bytes_of_the_earlier_process(receipt: DeliveryRefused) -> None:
    journal, receiver = KeptJournal(), Receiver(receipt)
    first = RuntimeHarness(journal=journal, reporter=receiver, patience=ONCE)
    rollout = await given_up(first, key="hunter2")
    later = Receiver(YES)
    second = await restored(journal, reporter=later, patience=ONCE)
    found = second.rollouts[0]
    assert (found.delivery, later.parcels) == (delivery_of(rollout), [])
    assert second.roster.redeliver(Selection(ME)) == [rollout.uid]
    await until(lambda: not found.owes)
    assert [(each.key, each.body) for each in later.parcels] == [(each.key, each.body) for each in receiver.parcels]
    assert (later.credentials, later.packed) == (["hunter2"], 0)
    third = await restored(second.roster.journal, reporter=Receiver(YES))  # type: ignore[arg-type]
    assert delivery_of(third.rollouts[0]).state is DeliveryState.ACKNOWLEDGED
    assert third.rollouts[0].credentials == Credentials()
    assert third.roster.redeliver(Selection(ME)) == []


async def test_a_redelivery_that_a_crash_interrupts_goes_on_with_its_new_time_limit() -> None:
    policy = DeliveryRetryPolicy(expiry=100, first=10, most=10)
    journal = KeptJournal()
    first = RuntimeHarness(journal=journal, reporter=Receiver(DOWN), patience=policy)
    await given_up(first)
    await asyncio.sleep(1000)
    first.roster.redeliver(Selection(ME))
    await asyncio.sleep(50)
    receiver = Receiver(YES)
    second = await restored(journal, reporter=receiver, patience=policy)
    found = second.rollouts[0]
    await until(lambda: not found.owes)
    assert (delivery_of(found).state, len(receiver.parcels)) == (DeliveryState.ACKNOWLEDGED, 1)

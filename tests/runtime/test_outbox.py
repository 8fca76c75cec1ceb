"""The outbox: one outcome, the same bytes under the same key, sent until it is acknowledged."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest
from rollout_server.core.outcome import Cancellation, Stop
from rollout_server.core.spec import Target
from rollout_server.runtime.outcome_delivery import Delivery, DeliveryRefused, DeliveryState, DeliveryUnsettled
from rollout_server.runtime.ports import Credentials
from rollout_server.runtime.registry.dependencies import Attempt, DeliveryRetryPolicy, NoReporter
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.start_request import Capacity

from tests.runtime.outcome_receivers import DOWN, RECEIVER, YES, Noting, Receiver, owing, until
from tests.runtime.test_ends import Stubborn
from tests.support.runtime_harness import (
    EPOCH,
    FOREVER,
    ME,
    Looping,
    RuntimeHarness,
    Say,
    Script,
    outcome_of,
)

BUSY = DeliveryUnsettled("later", retry_after=7.0)
PATIENT = DeliveryRetryPolicy(expiry=1e9)


async def delivered(world: RuntimeHarness, **fields: object) -> Delivery:
    """Wait until a rollout's delivery is settled, and return it."""
    rollout, _ = world.wish(owing(world, **fields))  # type: ignore[arg-type]
    await outcome_of(rollout)
    await until(lambda: rollout.delivery is not None and not rollout.owes)
    await asyncio.sleep(0)
    assert rollout.delivery is not None
    return rollout.delivery


async def test_an_outcome_is_delivered_once_where_it_is_taken(new_world: type[RuntimeHarness]) -> None:
    receiver = Receiver(YES)
    world = new_world(reporter=receiver)
    delivery = await delivered(world)
    await asyncio.sleep(10_000)
    (parcel,) = receiver.parcels
    assert (parcel.target, parcel.key) == (RECEIVER, "u1/outcome")
    assert str(Stop("stop")) in parcel.body.decode()
    assert (delivery.state, delivery.attempts, delivery.error) == (DeliveryState.ACKNOWLEDGED, 1, "")
    assert delivery.ended is not None
    assert delivery.ended >= EPOCH
    assert world.roster.owed == 0


async def test_a_rollout_without_a_receiver_has_no_delivery(new_world: type[RuntimeHarness]) -> None:
    receiver = Receiver()
    world = new_world(reporter=receiver)
    rollout = world.start()
    await outcome_of(rollout)
    await asyncio.sleep(10)
    assert (rollout.delivery, rollout.owes, receiver.parcels, receiver.packed) == (None, False, [], 0)


async def test_every_attempt_has_the_same_bytes_and_the_same_key(new_world: type[RuntimeHarness]) -> None:
    receiver = Receiver(DOWN, BUSY, DOWN, YES)
    delivery = await delivered(new_world(reporter=receiver))
    assert len({(parcel.key, parcel.body) for parcel in receiver.parcels}) == receiver.packed == 1
    assert (delivery.state, delivery.attempts, len(receiver.parcels)) == (DeliveryState.ACKNOWLEDGED, 4, 4)


async def test_outcomes_of_several_rollouts_have_keys_of_their_own(new_world: type[RuntimeHarness]) -> None:
    receiver = Receiver(DOWN, YES)
    world = new_world(reporter=receiver)
    for number in range(5):
        world.wish(owing(world, rollout_id=f"r{number}"))
    await until(lambda: world.roster.totals.finished == 5 and world.roster.owed == 0)
    assert len({parcel.key for parcel in receiver.parcels}) == len({parcel.body for parcel in receiver.parcels}) == 5


async def test_what_was_cancelled_before_it_ran_is_told_of_too(new_world: type[RuntimeHarness]) -> None:
    receiver = Receiver(DOWN, YES)
    world = new_world(reporter=receiver, capacity=Capacity(running=1))
    world.start(Say(seconds=FOREVER))
    queued, _ = world.wish(owing(world))
    world.roster.cancel(Selection(ME, uids=(queued.uid,)), "not needed")
    await until(lambda: world.roster.totals.finished == 1 and world.roster.owed == 0)
    assert [str(Cancellation("not needed")) in parcel.body.decode() for parcel in receiver.parcels] == [True, True]
    assert queued.delivery is not None
    assert queued.delivery.state is DeliveryState.ACKNOWLEDGED


async def test_a_refusal_is_final_and_its_text_is_kept(
    new_world: type[RuntimeHarness], caplog: pytest.LogCaptureFixture
) -> None:
    receiver = Receiver(DOWN, DeliveryRefused("receiver answered 400: no such rollout"), YES)
    delivery = await delivered(new_world(reporter=receiver))
    await asyncio.sleep(10_000)
    assert len(receiver.parcels) == 2
    assert (delivery.state, delivery.attempts) == (DeliveryState.REFUSED, 2)
    assert delivery.error == "receiver answered 400: no such rollout"
    assert "not delivered after 2 attempts: refused" in caplog.text
    assert "no such rollout" not in caplog.text  # a receiver's text could forge a line of the log


async def test_waits_double_up_to_the_longest(new_world: type[RuntimeHarness]) -> None:
    receiver = Receiver(*[DOWN] * 8, YES)
    await delivered(new_world(reporter=receiver, patience=replace(PATIENT, first=2.0, most=25.0)))
    assert receiver.waits == [2, 4, 8, 16, 25, 25, 25, 25]


async def test_retry_after_makes_a_wait_longer_and_never_shorter(new_world: type[RuntimeHarness]) -> None:
    receiver = Receiver(DOWN, BUSY, BUSY, BUSY, replace(BUSY, retry_after=0.0), replace(BUSY, retry_after=-5.0), YES)
    await delivered(new_world(reporter=receiver, patience=PATIENT))
    assert receiver.waits == [1, 7, 7, 8, 16, 30]


async def test_a_retry_after_beyond_the_time_limit_ends_no_delivery(new_world: type[RuntimeHarness]) -> None:
    receiver = Receiver(replace(BUSY, retry_after=100.0), YES)
    delivery = await delivered(new_world(reporter=receiver, patience=DeliveryRetryPolicy(expiry=100)))
    assert (receiver.waits, delivery.state) == ([1], DeliveryState.ACKNOWLEDGED)


async def test_between_attempts_it_is_told_when_the_next_one_is(new_world: type[RuntimeHarness]) -> None:
    receiver = Receiver(BUSY, YES, seconds=0.5)
    world = new_world(reporter=receiver)
    rollout, _ = world.wish(owing(world))
    await until(lambda: len(receiver.parcels) == 1 and rollout.delivery != Delivery(attempts=1))
    began = EPOCH + receiver.times[0]
    assert rollout.delivery == Delivery(attempts=1, error="later", next_attempt=pytest.approx(began + 7.5))
    await until(lambda: not rollout.owes)
    assert rollout.delivery.state is DeliveryState.ACKNOWLEDGED
    assert rollout.delivery.next_attempt is None
    assert rollout.delivery.ended == pytest.approx(began + 8.0)


async def test_during_an_attempt_there_is_no_next_one(new_world: type[RuntimeHarness]) -> None:
    receiver = Receiver(DOWN, YES, seconds=10)
    world = new_world(reporter=receiver)
    rollout, _ = world.wish(owing(world))
    await until(lambda: len(receiver.parcels) == 2)
    assert rollout.delivery == Delivery(attempts=2, error="nobody there")


@pytest.mark.parametrize("retries", [0, 1, 2])
async def test_after_the_last_retry_it_is_given_up(new_world: type[RuntimeHarness], retries: int) -> None:
    receiver = Receiver(DOWN)
    delivery = await delivered(new_world(reporter=receiver, patience=DeliveryRetryPolicy(retries=retries)))
    await asyncio.sleep(10_000)
    assert len(receiver.parcels) == 1 + retries
    assert (delivery.state, delivery.attempts) == (DeliveryState.EXPIRED, 1 + retries)
    assert delivery.error == "nobody there"


async def test_after_its_expiry_it_is_given_up_and_no_attempt_begins_later(new_world: type[RuntimeHarness]) -> None:
    receiver = Receiver(DOWN)
    delivery = await delivered(new_world(reporter=receiver, patience=DeliveryRetryPolicy(expiry=100)))
    await asyncio.sleep(10_000)
    assert sum(receiver.waits) == 1 + 2 + 4 + 8 + 16 + 30 + 30
    assert (delivery.state, delivery.attempts) == (DeliveryState.EXPIRED, 8)
    assert delivery.ended == pytest.approx(EPOCH + receiver.times[-1])


async def test_the_time_that_attempts_take_counts(new_world: type[RuntimeHarness]) -> None:
    receiver = Receiver(DOWN, seconds=60)
    await delivered(new_world(reporter=receiver, patience=DeliveryRetryPolicy(expiry=100)))
    assert receiver.waits == [61]


async def test_without_a_reporter_nobody_is_told_and_the_delivery_says_so(new_world: type[RuntimeHarness]) -> None:
    delivery = await delivered(new_world(reporter=NoReporter()))
    assert (delivery.state, delivery.error) == (DeliveryState.REFUSED, "this server does not deliver outcomes")


@pytest.mark.parametrize("part", ["pack", "deliver"])
async def test_a_reporter_that_raises_ends_its_delivery_and_no_other(
    new_world: type[RuntimeHarness], caplog: pytest.LogCaptureFixture, part: str
) -> None:
    receiver = Receiver(YES) if part == "pack" else Receiver(DOWN, LookupError("broken"), YES)
    receiver.unpackable = LookupError("broken") if part == "pack" else None
    world = new_world(reporter=receiver)
    delivery = await delivered(world)
    assert (delivery.state, delivery.attempts) == (DeliveryState.EXPIRED, 0 if part == "pack" else 2)
    assert delivery.error == "internal error of the server; its log has the reason"
    assert [
        record.exc_info is not None
        for record in caplog.records
        if "delivery of the outcome of rollout u1 failed" in record.message
    ] == [True]
    receiver.unpackable = None
    assert (await delivered(world, rollout_id="other")).state is DeliveryState.ACKNOWLEDGED


async def test_an_observer_hears_of_every_attempt(new_world: type[RuntimeHarness]) -> None:
    noting, receiver = Noting(), Receiver(DOWN, BUSY, YES, DeliveryRefused("no"), seconds=0.25)
    world = new_world(reporter=receiver, observer=noting)
    await delivered(world)
    await delivered(world, rollout_id="other")
    assert noting.attempts == [
        ("u1", Attempt.FAILED, 250),
        ("u1", Attempt.FAILED, 250),
        ("u1", Attempt.ACKNOWLEDGED, 250),
        ("u2", Attempt.REFUSED, 250),
    ]


async def test_an_agent_that_does_not_give_way_does_not_hold_back_its_outcome(new_world: type[RuntimeHarness]) -> None:
    agent, receiver = Stubborn(), Receiver()
    world = new_world(agent, reporter=receiver)
    rollout, _ = world.wish(owing(world))
    await asyncio.sleep(1)
    ended = asyncio.get_running_loop().time()
    world.roster.cancel(Selection(ME), "not needed")
    await outcome_of(rollout)
    await asyncio.sleep(1)
    assert receiver.times == [ended]
    assert world.roster.running == 1, "the agent keeps its slot"
    assert world.roster.get(rollout.uid, ME) is rollout
    agent.free.set()


async def test_the_outcome_of_an_agent_that_never_gives_way_is_delivered_at_the_end_of_the_server() -> None:
    agent, receiver = Stubborn(), Receiver()
    world = RuntimeHarness(agent, Looping(), reporter=receiver)
    rollout, _ = world.wish(owing(world))
    await asyncio.sleep(1)
    await world.roster.drain(0)
    assert len(receiver.parcels) == 1
    assert not rollout.owes
    agent.free.set()


async def test_at_its_end_a_server_waits_for_deliveries_and_says_which_are_lost(
    new_world: type[RuntimeHarness], caplog: pytest.LogCaptureFixture
) -> None:
    receivers = {"quick": Receiver(DOWN, YES), "dead": Receiver(DOWN), "mute": Receiver(seconds=FOREVER)}

    class ByName(Receiver):
        async def deliver(self, parcel: object) -> object:  # type: ignore[override]
            return await receivers[parcel.target.url.rpartition("/")[2]].deliver(parcel)  # type: ignore[attr-defined]

    world = new_world(reporter=ByName(), patience=PATIENT)
    rollouts = {
        name: world.wish(
            owing(world, key="hunter2", rollout_id=name, outcome=Target(f"http://t/{name}", RECEIVER.dialect))
        )[0]
        for name in receivers
    }
    before = asyncio.get_running_loop().time()
    with caplog.at_level(logging.ERROR):
        await world.roster.drain(20)
    assert asyncio.get_running_loop().time() - before == pytest.approx(20)
    lost = [rollouts["dead"].uid, rollouts["mute"].uid]
    assert f"2 outcomes were not delivered before the shutdown: {', '.join(lost)}" in caplog.text
    assert rollouts["quick"].uid not in caplog.text
    assert [rollout.owes for rollout in rollouts.values()] == [False, True, True], (
        "undelivered outcomes stay marked as undelivered"
    )
    sent = [len(receiver.parcels) for receiver in receivers.values()]
    await asyncio.sleep(10_000)
    assert [len(receiver.parcels) for receiver in receivers.values()] == sent
    world.roster.acknowledge(rollouts["mute"].uid, ME)
    assert rollouts["mute"].credentials == Credentials()
    assert rollouts["mute"].delivery is not None
    assert rollouts["mute"].delivery.state is DeliveryState.ACKNOWLEDGED


async def test_a_server_that_has_no_time_gives_outcomes_a_little_all_the_same(new_world: type[RuntimeHarness]) -> None:
    receiver = Receiver(DOWN, DOWN, YES)
    world = new_world(reporter=receiver)
    world.scripts["r"] = Script(Say(seconds=FOREVER))
    rollout, _ = world.wish(owing(world))
    await world.roster.drain(0)
    assert receiver.waits == [1, 2]
    assert not rollout.owes

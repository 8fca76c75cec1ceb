"""Rollouts with an undelivered outcome: acknowledged, remembered, attached to, and limited in number."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from rollout_server.core.error import Busy, NotFound
from rollout_server.runtime.outcome_delivery import (
    DeliveryRefused,
    DeliveryState,
    DeliveryUnsettled,
    PackedOutcome,
    Receipt,
)
from rollout_server.runtime.ports import Credentials
from rollout_server.runtime.registry.dependencies import DeliveryRetryPolicy
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.start_request import Caller, Capacity

from tests.runtime.outcome_receivers import DOWN, RECEIVER, YES, Noting, Receiver, owing, until
from tests.runtime.test_ends import Stubborn
from tests.support.runtime_harness import (
    FOREVER,
    ME,
    RuntimeHarness,
    Say,
    Script,
    outcome_of,
)

PATIENT = DeliveryRetryPolicy(expiry=1e9)


class Unhearing(Receiver):
    """Return a receipt despite cancellation."""

    async def deliver(self, parcel: PackedOutcome) -> Receipt:
        try:
            return await super().deliver(parcel)
        except asyncio.CancelledError:
            return DeliveryUnsettled("cancelled")


class Spiteful(Receiver):
    """Raise its own exception on cancellation."""

    async def deliver(self, parcel: PackedOutcome) -> Receipt:
        try:
            return await super().deliver(parcel)
        except asyncio.CancelledError as error:
            raise LookupError from error


async def owed(world: RuntimeHarness, attempts: int = 1, request_id: str = "", **fields: object) -> Rollout:
    """A rollout whose outcome was offered `attempts` times without success."""
    rollout, _ = world.wish(owing(world, request_id, **fields))  # type: ignore[arg-type]
    await outcome_of(rollout)
    await until(lambda: rollout.delivery is not None and rollout.delivery.attempts == attempts)
    assert rollout.owes
    return rollout


class TestAcknowledged:
    @pytest.mark.parametrize("kind", [Receiver, Unhearing, Spiteful])
    async def test_an_acknowledgement_ends_the_attempt_under_way_and_nothing_more_is_sent(
        self, new_world: type[RuntimeHarness], kind: type[Receiver]
    ) -> None:
        receiver = kind(DOWN, seconds=FOREVER)
        world = new_world(reporter=receiver, patience=PATIENT)
        rollout = await owed(world)
        world.roster.acknowledge(rollout.uid, ME)
        acknowledged = rollout.delivery
        assert acknowledged is not None
        assert (acknowledged.state, acknowledged.attempts) == (DeliveryState.ACKNOWLEDGED, 1)
        await asyncio.sleep(100_000)
        assert rollout.delivery == acknowledged
        assert len(receiver.parcels) == 1
        assert world.roster.owed == 0

    async def test_between_two_attempts_too(self, new_world: type[RuntimeHarness]) -> None:
        receiver = Receiver(DOWN)
        world = new_world(reporter=receiver, patience=PATIENT)
        rollout = await owed(world, attempts=3)
        world.roster.acknowledge(rollout.uid, ME)
        await asyncio.sleep(100_000)
        assert len(receiver.parcels) == 3
        assert rollout.delivery is not None
        assert (rollout.delivery.state, rollout.delivery.error) == (DeliveryState.ACKNOWLEDGED, "")

    async def test_before_the_first_attempt_there_is_none(self, new_world: type[RuntimeHarness]) -> None:
        receiver = Receiver()
        world = new_world(reporter=receiver)
        rollout, _ = world.wish(owing(world))
        await rollout.log.final_entry()
        world.roster.acknowledge(rollout.uid, ME)
        await asyncio.sleep(100)
        assert receiver.parcels == []
        assert rollout.delivery is not None
        assert (rollout.delivery.state, rollout.delivery.attempts) == (DeliveryState.ACKNOWLEDGED, 0)

    async def test_while_its_agent_does_not_give_way_too(self, new_world: type[RuntimeHarness]) -> None:
        agent, receiver = Stubborn(), Receiver(DOWN)
        world = new_world(agent, reporter=receiver, patience=PATIENT, capacity=Capacity(finished=1))
        rollout, _ = world.wish(owing(world, key="hunter2"))
        await asyncio.sleep(1)
        await outcome_of(rollout)
        await asyncio.sleep(0)
        world.roster.acknowledge(rollout.uid, ME)
        agent.free.set()
        await asyncio.sleep(1000)
        assert len(receiver.parcels) == 1
        assert (world.roster.totals.finished, rollout.credentials) == (1, Credentials())
        assert world.roster.get(rollout.uid, ME) is rollout, "it counts once as a remembered rollout"

    async def test_of_a_delivery_that_was_acknowledged_it_changes_nothing(
        self, new_world: type[RuntimeHarness]
    ) -> None:
        world = new_world(reporter=Receiver(YES))
        rollout, _ = world.wish(owing(world))
        await outcome_of(rollout)
        await asyncio.sleep(10)
        before = rollout.delivery
        world.roster.acknowledge(rollout.uid, ME)
        await asyncio.sleep(10)
        assert before is not None
        assert rollout.delivery == before
        assert before.state is DeliveryState.ACKNOWLEDGED

    @pytest.mark.parametrize("receipt", [DeliveryRefused("no"), DOWN])
    async def test_a_delivery_that_was_given_up_is_acknowledged(
        self, new_world: type[RuntimeHarness], receipt: Receipt
    ) -> None:
        receiver = Receiver(receipt)
        world = new_world(reporter=receiver, patience=DeliveryRetryPolicy(retries=0))
        rollout, _ = world.wish(owing(world, key="hunter2"))
        await until(lambda: rollout.undelivered)
        world.roster.acknowledge(rollout.uid, ME)
        assert rollout.delivery is not None
        assert (rollout.delivery.state, rollout.delivery.attempts) == (DeliveryState.ACKNOWLEDGED, 1)
        assert (rollout.undelivered, rollout.credentials) == (False, Credentials())
        assert world.roster.redeliver(Selection(ME)) == []
        await asyncio.sleep(1000)
        assert len(receiver.parcels) == 1

    async def test_an_attempt_that_was_given_up_is_not_observed_as_one_that_answered(
        self, new_world: type[RuntimeHarness]
    ) -> None:
        noting = Noting()
        world = new_world(reporter=Receiver(seconds=FOREVER), observer=noting)
        rollout = await owed(world)
        world.roster.acknowledge(rollout.uid, ME)
        await asyncio.sleep(10)
        assert noting.attempts == []


class TestCredentials:
    async def test_the_next_attempt_uses_what_a_caller_brought_who_attached_anew(
        self, new_world: type[RuntimeHarness]
    ) -> None:
        receiver = Receiver(DOWN)
        world = new_world(reporter=receiver)
        rollout = await owed(world, 2, "key", key="old")
        assert world.wish(owing(world, "key", key="new")) == (rollout, True)
        await until(lambda: len(receiver.parcels) == 3)
        assert world.wish(owing(world, "key")) == (rollout, True)
        await until(lambda: len(receiver.parcels) == 4)
        assert receiver.credentials == ["old", "old", "new", "new"]
        assert len({parcel.body for parcel in receiver.parcels}) == 1

    async def test_one_that_is_brought_while_the_agent_does_not_give_way_counts(
        self, new_world: type[RuntimeHarness]
    ) -> None:
        agent, receiver = Stubborn(), Receiver(DOWN)
        world = new_world(agent, reporter=receiver)
        rollout, _ = world.wish(owing(world, "key", key="old"))
        await asyncio.sleep(1)
        await rollout.log.final_entry()
        world.wish(owing(world, "key", key="new"))
        await until(lambda: len(receiver.parcels) == 2)
        assert receiver.credentials[1] == "new"
        agent.free.set()

    async def test_they_are_gone_once_the_outcome_is_acknowledged(self, new_world: type[RuntimeHarness]) -> None:
        receiver = Receiver(DOWN, YES)
        world = new_world(reporter=receiver, patience=DeliveryRetryPolicy(retries=1))
        rollout, _ = world.wish(owing(world, "key", key="hunter2"))
        await until(lambda: len(receiver.parcels) == 1)
        assert rollout.credentials == Credentials(outcome="hunter2")
        await until(lambda: not rollout.owes)
        await asyncio.sleep(1)
        assert rollout.credentials == Credentials()
        world.wish(owing(world, "key", key="hunter2"))
        assert rollout.credentials == Credentials(), "a rollout whose outcome arrived stores no credentials"

    @pytest.mark.parametrize("receipt", [DeliveryRefused("no"), LookupError(), DOWN])
    async def test_an_outcome_that_was_not_delivered_keeps_its_own(
        self, new_world: type[RuntimeHarness], receipt: Receipt | Exception
    ) -> None:
        """It may be sent again, and a caller that attaches may bring a better one."""
        receiver = Receiver(DOWN, receipt)
        world = new_world(reporter=receiver, patience=DeliveryRetryPolicy(retries=1))
        rollout, _ = world.wish(owing(world, "key", key="old"))
        await until(lambda: rollout.undelivered)
        await asyncio.sleep(1)
        assert rollout.credentials == Credentials(outcome="old")
        rollout.update_credentials(Credentials("trainer", tools="tools", models={"judge": "judge"}))
        assert rollout.credentials == Credentials(outcome="old")
        world.wish(owing(world, "key", key="new"))
        assert rollout.credentials == Credentials(outcome="new")

    def test_a_parcel_shows_neither_its_credential_nor_its_contents(self) -> None:
        parcel = PackedOutcome(RECEIVER, "u1/outcome", b"hunter2", "hunter2")
        assert "hunter2" not in repr(parcel)

    @pytest.mark.parametrize(
        ("old", "by", "merged"),
        [
            (Credentials("a", "b", "c"), Credentials(), Credentials("a", "b", "c")),
            (Credentials("a", "b", "c"), Credentials("x"), Credentials("x", "b", "c")),
            (Credentials("a", "b", "c"), Credentials(outcome="y"), Credentials("a", "y", "c")),
            (Credentials("a", "b", "c"), Credentials(tools="z"), Credentials("a", "b", "z")),
            (Credentials(), Credentials("x", "y", "z"), Credentials("x", "y", "z")),
            (
                Credentials(models={"judge": "a", "user": "b"}),
                Credentials(models={"judge": "x", "user": ""}),
                Credentials(models={"judge": "x", "user": "b"}),
            ),
        ],
    )
    def test_those_that_are_not_brought_stay(self, old: Credentials, by: Credentials, merged: Credentials) -> None:
        assert old.updated(by) == merged
        assert set(merged.secrets()) == {merged.completions, merged.outcome, merged.tools, *merged.models.values()} - {
            ""
        }


class TestRemembered:
    async def test_a_rollout_that_owes_its_outcome_is_not_forgotten_and_its_id_attaches(
        self, new_world: type[RuntimeHarness]
    ) -> None:
        receiver = Receiver(DOWN, DOWN, DOWN, YES)
        world = new_world(
            reporter=receiver,
            patience=DeliveryRetryPolicy(first=100, most=100),
            capacity=Capacity(finished=1, finished_seconds=10),
        )
        rollout = await owed(world, 1, "key")
        for _ in range(3):
            await outcome_of(world.start())
            await asyncio.sleep(50)
            world.roster.forget()
            assert world.roster.get(rollout.uid, ME) is rollout
            assert world.wish(owing(world, "key")) == (rollout, True)
        await until(lambda: not rollout.owes)
        await asyncio.sleep(8)
        world.roster.forget()
        assert world.roster.get(rollout.uid, ME) is rollout, "its retention starts when the delivery is settled"
        await asyncio.sleep(3)
        world.roster.forget()
        with pytest.raises(NotFound):
            world.roster.get(rollout.uid, ME)

    async def test_it_is_selected_by_how_far_its_delivery_is(self, new_world: type[RuntimeHarness]) -> None:
        world = new_world(reporter=Receiver(DeliveryRefused("no"), YES, DOWN), patience=PATIENT)
        refused, _ = world.wish(owing(world, rollout_id="a"))
        await until(lambda: refused.delivery is not None and not refused.owes)
        taken, _ = world.wish(owing(world, rollout_id="b"))
        await until(lambda: taken.delivery is not None and not taken.owes)
        pending = await owed(world, rollout_id="c")
        world.scripts["d"] = Script(Say(seconds=FOREVER))
        running, _ = world.wish(owing(world, rollout_id="d"))
        none = world.start()

        def selected(*states: DeliveryState) -> list[Rollout]:
            return [rollout for _, rollout in world.roster.select(Selection(ME, delivery_states=states))]

        assert selected(DeliveryState.REFUSED) == [refused]
        assert selected(DeliveryState.ACKNOWLEDGED) == [taken]
        assert selected(DeliveryState.PENDING) == [pending]
        assert selected(DeliveryState.EXPIRED) == []
        assert selected(*DeliveryState) == [pending, taken, refused]
        assert selected() == [none, running, pending, taken, refused]


class TestBound:
    async def test_no_more_are_taken_than_may_owe_their_outcome(self, new_world: type[RuntimeHarness]) -> None:
        receiver = Receiver(DOWN)
        world = new_world(reporter=receiver, patience=PATIENT, capacity=Capacity(finished=2))
        first = await owed(world, 1, "key", rollout_id="a")
        second = await owed(world, rollout_id="b")
        assert world.roster.owed == 2
        with pytest.raises(Busy) as refused:
            world.wish(owing(world, rollout_id="c"))
        assert (refused.value.reason, refused.value.retry_after > 0) == ("TOO_MANY_ROLLOUTS", True)
        assert "2 outcomes wait for their receivers" in refused.value.message
        assert [rollout for _, rollout in world.roster.select(Selection(ME))] == [second, first]
        assert world.wish(owing(world, "key", rollout_id="a")) == (first, True), "a known request id is still found"
        assert world.start() is not None, "a rollout without an outcome target is accepted"
        world.roster.acknowledge(first.uid, ME)
        await asyncio.sleep(1)
        assert world.wish(owing(world, rollout_id="c"))[1] is False

    async def test_where_nothing_is_remembered_one_may_owe_its_outcome(self, new_world: type[RuntimeHarness]) -> None:
        world = new_world(reporter=Receiver(DOWN, YES), capacity=Capacity(finished=0))
        rollout = await owed(world)
        with pytest.raises(Busy, match="1 outcomes wait"):
            world.wish(owing(world, rollout_id="other"))
        await until(lambda: not rollout.owes)
        await asyncio.sleep(1)
        assert [*world.roster.select(Selection(ME))] == []
        assert world.wish(owing(world, rollout_id="other"))[1] is False

    async def test_a_caller_whose_receivers_are_down_leaves_the_others_their_share(
        self, new_world: type[RuntimeHarness]
    ) -> None:
        world = new_world(reporter=Receiver(DOWN), patience=PATIENT, capacity=Capacity(finished=4))

        async def owe(caller: str, count: int) -> None:
            """Start rollouts of a caller one after another in the same moment, and wait until they owe their outcomes."""
            requests = [replace(owing(world, rollout_id=f"{caller}{at}"), caller=caller) for at in range(count)]
            rollouts = [world.wish(request)[0] for request in requests]
            await until(lambda: all(rollout.owes for rollout in rollouts))

        await owe("alice", 9)
        for caller, share in (("bob", 2), ("carol", 1), ("dora", 1)):
            with pytest.raises(Busy, match="your share is"):
                await owe("alice", 1)
            for _ in range(share):
                await owe(caller, 1)
            with pytest.raises(Busy, match=f"at most 4 may; {share} are yours, your share is {share}"):
                await owe(caller, 1)
        for _, rollout in [*world.roster.select(Selection(Caller("admin", admin=True)))]:
            world.roster.acknowledge(rollout.uid, Caller("admin", admin=True))
        await asyncio.sleep(1)
        await owe("alice", 4)  # all of it, since nobody else owes any
        with pytest.raises(Busy, match="4 are yours, your share is 4"):
            await owe("alice", 1)

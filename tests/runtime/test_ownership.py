"""Owners of rollouts: callers are isolated from each other, and an admin sees all rollouts."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from rollout_server.core.error import NotFound
from rollout_server.core.outcome import Stop
from rollout_server.runtime.outcome_delivery import DeliveryState
from rollout_server.runtime.ports import Credentials
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import Rollout, RolloutState
from rollout_server.runtime.start_request import Caller, Capacity

from tests.runtime.outcome_receivers import DOWN, Receiver, owing, until
from tests.support.runtime_harness import ADMIN, FOREVER, ME, OTHER, RuntimeHarness, Say, a_wish, outcome_of

BLOCKED = Say(seconds=FOREVER)
STRANGERS = (OTHER, Caller(""), Caller("ME"), Caller("me "), Caller("m"))


async def finished(world: RuntimeHarness) -> Rollout:
    """A finished rollout of the caller "me"."""
    rollout = world.start()
    await outcome_of(rollout)
    return rollout


def seen(world: RuntimeHarness, caller: Caller, **conditions: object) -> list[Rollout]:
    """The rollouts that a caller can list."""
    return [rollout for _, rollout in world.roster.select(Selection(caller, **conditions))]  # type: ignore[arg-type]


async def test_two_callers_with_the_same_request_do_not_meet(new_world: type[RuntimeHarness]) -> None:
    world = new_world(capacity=Capacity(running=1))
    world.start(BLOCKED)
    wish = replace(a_wish("key"), credentials=Credentials("mine"))
    mine, _ = world.wish(wish)
    theirs, found = world.wish(replace(wish, caller="other", credentials=Credentials("theirs")))
    assert (found, theirs is mine) == (False, False)
    assert (mine.credentials.completions, theirs.credentials.completions) == ("mine", "theirs")
    assert world.wish(wish) == (mine, True)
    assert world.wish(replace(wish, caller="other")) == (theirs, True)


async def test_another_payload_under_somebody_elses_id_is_no_conflict(new_world: type[RuntimeHarness]) -> None:
    """A conflict would reveal that the id exists."""
    world = new_world()
    world.wish(a_wish("key"))
    assert world.wish(replace(a_wish("key", priority=1), caller="other"))[1] is False


async def test_an_admin_who_asks_for_a_rollout_does_not_meet_its_owner_either(new_world: type[RuntimeHarness]) -> None:
    world = new_world()
    mine, _ = world.wish(a_wish("key"))
    theirs, found = world.wish(replace(a_wish("key"), caller=ADMIN.name))
    assert (found, theirs is mine) == (False, False)


@pytest.mark.parametrize("stranger", STRANGERS, ids=repr)
async def test_others_cannot_tell_it_from_one_that_does_not_exist(
    new_world: type[RuntimeHarness], stranger: Caller
) -> None:
    world = new_world()
    rollout = await finished(world)
    told = []
    for uid in (rollout.uid, "u9"):
        for ask in (world.roster.get, world.roster.acknowledge):
            with pytest.raises(NotFound) as missing:
                ask(uid, stranger)
            told.append((missing.value.reason, missing.value.message.replace(uid, "UID")))
    assert len(set(told)) == 1
    assert not rollout.received
    assert seen(world, stranger) == seen(world, stranger, uids=(rollout.uid,)) == []


@pytest.mark.parametrize("stranger", STRANGERS, ids=repr)
async def test_others_cannot_cancel_it_however_they_name_it(new_world: type[RuntimeHarness], stranger: Caller) -> None:
    world = new_world(capacity=Capacity(running=1))
    running, queued = world.start(BLOCKED), world.start(Say("8"), group_id="g", labels={"a": "b"})
    for conditions in (
        {},
        {"uids": (running.uid, queued.uid)},
        {"rollout_ids": ("r1", "r2")},
        {"group_id": "g"},
        {"labels": {"a": "b"}},
        {"states": (RolloutState.RUNNING, RolloutState.QUEUED)},
        {"callers": ("me",)},
    ):
        assert world.roster.cancel(Selection(stranger, **conditions), "theirs") == []  # type: ignore[arg-type]
    assert not running.ending.requested.done()
    assert not queued.ending.requested.done()


async def test_others_cannot_end_the_delivery_of_its_outcome(new_world: type[RuntimeHarness]) -> None:
    world = new_world(reporter=Receiver(DOWN))
    rollout, _ = world.wish(owing(world))
    await until(lambda: rollout.owes)
    with pytest.raises(NotFound):
        world.roster.acknowledge(rollout.uid, OTHER)
    assert rollout.owes
    world.roster.acknowledge(rollout.uid, ADMIN)
    assert not rollout.owes


async def test_an_admin_sees_acknowledges_and_cancels_everybodys(new_world: type[RuntimeHarness]) -> None:
    world = new_world()
    mine, theirs = await finished(world), world.start(BLOCKED, caller="other")
    await asyncio.sleep(1)
    assert seen(world, ADMIN) == [theirs, mine]
    assert (world.roster.get(mine.uid, ADMIN), world.roster.get(theirs.uid, ADMIN)) == (mine, theirs)
    world.roster.acknowledge(mine.uid, ADMIN)
    assert mine.received
    assert world.roster.cancel(Selection(ADMIN), "everything") == [theirs.uid]
    assert (await outcome_of(mine)).end == Stop("stop")


async def test_being_called_admin_does_not_make_one(new_world: type[RuntimeHarness]) -> None:
    world = new_world()
    world.start()
    assert seen(world, Caller("admin")) == []


async def test_rollouts_are_selected_by_their_callers_among_those_one_sees(new_world: type[RuntimeHarness]) -> None:
    world = new_world()
    mine, theirs, third = world.start(), world.start(caller="other"), world.start(caller="third")
    assert seen(world, ADMIN, callers=("other",)) == [theirs]
    assert seen(world, ADMIN, callers=("third", "me")) == [third, mine]
    assert seen(world, ADMIN, callers=("nobody",)) == []
    assert seen(world, ADMIN, callers=("me",), uids=(theirs.uid,)) == []
    assert seen(world, ME, callers=("me",)) == [mine]
    assert seen(world, ME, callers=("me", "other", "third")) == [mine]
    assert seen(world, ME, callers=("other",)) == []


async def test_deliveries_of_others_are_not_found_by_their_state(new_world: type[RuntimeHarness]) -> None:
    world = new_world(reporter=Receiver(DOWN))
    mine, _ = world.wish(owing(world))
    theirs, _ = world.wish(replace(owing(world), caller="other"))
    await until(lambda: mine.owes and theirs.owes)
    pending = (DeliveryState.PENDING,)
    assert seen(world, ME, delivery_states=pending) == [mine]
    assert seen(world, OTHER, delivery_states=pending) == [theirs]
    assert seen(world, ADMIN, delivery_states=pending) == [theirs, mine]


@pytest.mark.parametrize(
    ("caller", "owner", "sees"),
    [
        (ME, "me", True),
        (ME, "other", False),
        (ME, "", False),
        (Caller(""), "", True),
        (ADMIN, "admin", True),
        (ADMIN, "me", True),
        (ADMIN, "", True),
    ],
)
def test_a_caller_sees_its_own_and_an_admin_everybodys(caller: Caller, owner: str, sees: bool) -> None:
    assert caller.sees(owner) is sees

"""Request ids: the same id and payload return the same rollout, for a limited time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from rollout_server import Limits
from rollout_server.core.error import Conflict
from rollout_server.core.spec import Dialect, Sampling, Target
from rollout_server.runtime.outcome_delivery import DeliveryState
from rollout_server.runtime.ports import Credentials
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.start_request import Capacity, StartRequest

from tests.runtime.outcome_receivers import YES, Receiver, owing, until
from tests.runtime.test_journal import restored
from tests.runtime.test_roster import ALL, BLOCKED, Other
from tests.support.journal import KeptJournal
from tests.support.runtime_harness import (
    ME,
    Looping,
    RuntimeHarness,
    Say,
    a_spec,
    a_wish,
    outcome_of,
)


async def test_together_or_later_the_same_id_and_payload_find_the_same_rollout(new_world: type[RuntimeHarness]) -> None:
    world = new_world()
    rollout, found = world.wish(a_wish("key"))
    assert not found
    assert world.wish(a_wish("key")) == (rollout, True)
    await outcome_of(rollout)
    assert world.wish(a_wish("key")) == (rollout, True)
    assert world.opened == ["r"]


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": Sampling(temperature=0.5)},
        {"limits": Limits(turns=2)},
        {"metadata_json": '{"a": 2}'},
        {"priority": 1},
        {"labels": {"a": "b"}},
        {"agent": "other"},
    ],
)
async def test_the_same_id_with_another_payload_is_a_conflict(
    new_world: type[RuntimeHarness], fields: dict[str, Any]
) -> None:
    world = new_world(Looping(), Other())
    rollout, _ = world.wish(a_wish("key", metadata_json='{"a": 1}'))
    for _ in range(2):
        with pytest.raises(Conflict) as refused:
            world.wish(a_wish("key", **{"metadata_json": '{"a": 1}', **fields}))
        assert refused.value.reason == "REQUEST_ID_TAKEN"
        await outcome_of(rollout)
    assert len(world.rollouts) == 1


async def test_what_only_concerns_waiting_or_writing_is_no_other_payload(new_world: type[RuntimeHarness]) -> None:
    world = new_world()
    rollout, _ = world.wish(a_wish("key", metadata_json='{"a": 1, "b": [2]}'))
    same = a_wish("key", metadata_json='{"b":[2],"a":1}', cancel_after_detach=5, agent="looping")
    assert world.wish(same) == (rollout, True)


async def test_ids_of_other_callers_trainers_and_none_at_all_are_others(new_world: type[RuntimeHarness]) -> None:
    world = new_world()
    mine = a_wish("key")
    rollouts = [
        world.wish(wish)[0]
        for wish in (
            mine,
            replace(mine, caller="other"),
            replace(mine, spec=a_spec(completions=Target("grpc://elsewhere:1", Dialect.GRPC))),
            replace(mine, request_id=""),
            replace(mine, request_id=""),
        )
    ]
    assert len({rollout.uid for rollout in rollouts}) == 5


async def test_until_received_an_id_attaches_while_its_rollout_runs(new_world: type[RuntimeHarness]) -> None:
    world = new_world()
    wish = a_wish("key", until_received=True)
    world.scripts["r"] = world.scripts.setdefault("r", type(world.script(world.start()))(BLOCKED))
    rollout, _ = world.wish(wish)
    assert world.wish(wish) == (rollout, True)
    with pytest.raises(Conflict):
        world.wish(a_wish("key", until_received=True, priority=1))


async def finished_until_received(world: RuntimeHarness) -> Rollout:
    rollout, _ = world.wish(a_wish("key", until_received=True))
    await outcome_of(rollout)
    return rollout


async def test_until_received_an_outcome_that_nobody_received_is_handed_out(new_world: type[RuntimeHarness]) -> None:
    world = new_world()
    rollout = await finished_until_received(world)
    assert world.wish(a_wish("key", until_received=True)) == (rollout, True)


async def test_until_received_an_id_is_free_once_the_outcome_was(new_world: type[RuntimeHarness]) -> None:
    world = new_world()
    rollout = await finished_until_received(world)
    world.roster.acknowledge(rollout.uid, ME)
    again, found = world.wish(a_wish("key", until_received=True))
    assert not found
    assert again is not rollout
    assert world.wish(a_wish("key", until_received=True)) == (again, True)
    assert {found.uid for _, found in world.roster.select(ALL)} == {rollout.uid, again.uid}


async def test_until_received_a_receiver_does_not_free_the_id_of_a_caller() -> None:
    """The caller may still have to repeat its request, because it got no response."""
    journal = KeptJournal()
    world = RuntimeHarness(journal=journal, reporter=Receiver(YES))
    request = replace(owing(world, "key"), until_received=True)
    rollout, _ = world.wish(request)
    await until(lambda: not rollout.owes and rollout.outcome is not None)
    assert rollout.delivery is not None
    assert rollout.delivery.state is DeliveryState.ACKNOWLEDGED
    assert world.wish(request) == (rollout, True)
    world = await restored(journal)
    same, found = world.wish(request)
    assert (same.uid, found) == (rollout.uid, True)
    world.roster.acknowledge(same.uid, ME)
    again, found = world.wish(request)
    assert (again is same, found) == (False, False)


@pytest.mark.parametrize("received", [False, True])
async def test_until_received_another_payload_starts_anew_after_the_end(
    new_world: type[RuntimeHarness], received: bool
) -> None:
    world = new_world()
    rollout = await finished_until_received(world)
    if received:
        world.roster.acknowledge(rollout.uid, ME)
    again, found = world.wish(a_wish("key", until_received=True, priority=1))
    assert (found, again is rollout) == (False, False)


async def test_forgetting_the_first_rollout_of_an_id_leaves_the_second_one_its_id(
    new_world: type[RuntimeHarness],
) -> None:
    world = new_world(capacity=Capacity(finished=1))
    first = await finished_until_received(world)
    world.roster.acknowledge(first.uid, ME)
    second = await finished_until_received(world)
    await asyncio.sleep(1)
    assert [rollout for _, rollout in world.roster.select(ALL)] == [second]
    assert world.wish(a_wish("key", until_received=True)) == (second, True)


async def test_attaching_may_bring_a_new_credential_and_the_end_drops_it(new_world: type[RuntimeHarness]) -> None:
    world = new_world()
    rollout = world.start(Say("8", seconds=10), spec=a_spec())
    named, _ = world.wish(a_wish("key", key="old", limits=Limits(turns=9)))
    assert world.script(rollout) is world.script(named)
    world.wish(a_wish("key", limits=Limits(turns=9)))
    assert named.credentials == Credentials("old")
    world.wish(a_wish("key", key="new", limits=Limits(turns=9)))
    assert named.credentials == Credentials("new")
    await outcome_of(named)
    await asyncio.sleep(1)
    assert [ask.credentials.completions for ask in world.script(named).asks] == ["", "new"]
    assert named.credentials == Credentials()
    assert "new" not in repr(world.script(named).asks)


def test_a_wish_shows_no_credentials() -> None:
    credentials = Credentials("hunter2", "hunter2", "hunter2", {"judge": "hunter2"})
    assert "hunter2" not in repr(StartRequest(a_spec(), "me", credentials=credentials))


async def test_a_rollout_that_has_ended_takes_no_credential(new_world: type[RuntimeHarness]) -> None:
    world = new_world()
    rollout, _ = world.wish(a_wish("key", key="hunter2"))
    await outcome_of(rollout)
    await asyncio.sleep(1)
    world.wish(a_wish("key", key="hunter2"))
    assert rollout.credentials == Credentials()

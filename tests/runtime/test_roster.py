"""The roster: who is taken, who waits, who is found again, who sees what, and who is forgotten."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from rollout_server import Limits
from rollout_server.core.admission import Bounds
from rollout_server.core.error import Busy, Conflict, Draining, InvalidRequest, NotFound, NotPossible
from rollout_server.core.outcome import Cancellation, Stop
from rollout_server.core.spec import Dialect, DriftPolicy, Sampling, Target
from rollout_server.runtime.port import Credentials
from rollout_server.runtime.rollout import Rollout, RolloutState
from rollout_server.runtime.wish import Capacity, Selection, Wish

from tests.runtime.world import FOREVER, Looping, Say, World, a_spec, a_wish, outcome_of

BLOCKED = Say(seconds=FOREVER)
ALL = Selection("me")


class Other(Looping):
    """Another agent."""

    name = "other"
    limits = Limits(turns=3, seconds=30)


async def test_a_rollout_goes_from_queued_over_running_to_finished(new_world: type[World]) -> None:
    world = new_world(capacity=Capacity(running=1))
    first, second = world.start(Say("8", seconds=10)), world.start(Say("8", seconds=10))
    assert (first.state, second.state) == (RolloutState.RUNNING, RolloutState.QUEUED)
    assert (world.roster.running, world.roster.queued, world.roster.finished) == (1, 1, 0)
    await outcome_of(first)
    await asyncio.sleep(1)
    assert (first.state, second.state) == (RolloutState.FINISHED, RolloutState.RUNNING)
    assert (world.roster.running, world.roster.queued, world.roster.finished) == (1, 0, 1)
    outcome = await outcome_of(second)
    assert outcome.metrics.queued_ms == pytest.approx(10_000)
    assert second.finished == pytest.approx(second.created + 20)


async def test_those_who_wait_run_by_priority_and_then_by_age(new_world: type[World]) -> None:
    world = new_world(capacity=Capacity(running=1))
    rollouts = [
        world.start(Say("8", seconds=1), rollout_id=f"{priority}{letter}", priority=priority)
        for letter, priority in zip("abcdef", (0, 0, 5, -1, 5, 0), strict=True)
    ]
    for rollout in rollouts:
        await outcome_of(rollout)
    assert world.opened == ["0a", "5c", "5e", "0b", "0f", "-1d"]


async def test_one_more_than_can_wait_is_refused_and_can_come_again(new_world: type[World]) -> None:
    world = new_world(capacity=Capacity(running=1, queued=1))
    first = world.start(Say("8", seconds=10))
    world.start()
    with pytest.raises(Busy) as refused:
        world.wish(a_wish("key"))
    assert refused.value.reason == "TOO_MANY_ROLLOUTS"
    assert refused.value.retry_after > 0
    assert len([*world.roster.select(ALL)]) == 2
    await outcome_of(first)
    await asyncio.sleep(1)
    assert world.wish(a_wish("key"))[1] is False


async def test_who_is_known_is_found_even_where_nobody_new_is_taken(new_world: type[World]) -> None:
    world = new_world(capacity=Capacity(running=1, queued=0))
    rollout, _ = world.wish(a_wish("key"))
    assert world.wish(a_wish("key")) == (rollout, True)
    await world.roster.drain(60)
    assert world.wish(a_wish("key")) == (rollout, True)


async def test_a_server_that_drains_takes_nobody(new_world: type[World]) -> None:
    world = new_world()
    await world.roster.drain(0)
    with pytest.raises(Draining) as refused:
        world.start()
    assert refused.value.reason == "DRAINING"
    assert [*world.roster.select(ALL)] == []


async def test_the_agent_is_the_named_one_or_the_first(new_world: type[World]) -> None:
    world = new_world(Looping(), Other())
    assert world.start().agent.name == "looping"
    other = world.start(agent="other", limits=Limits(turns=5))
    assert other.spec.agent == "other"
    assert other.spec.limits == Limits(turns=3, seconds=30)
    with pytest.raises(NotFound) as missing:
        world.start(agent="third")
    assert missing.value.reason == "AGENT_NOT_FOUND"
    assert "['looping', 'other']" in missing.value.message


async def test_what_a_request_leaves_open_is_filled_in(new_world: type[World]) -> None:
    world = new_world(bounds=Bounds(seconds=100, default_seconds={Dialect.GRPC: 50}, on_drift=DriftPolicy.FAIL))
    assert world.start().spec.limits.seconds == 50
    assert world.start(limits=Limits(seconds=7)).spec.limits.seconds == 7
    assert world.start(limits=Limits(seconds=700)).spec.limits.seconds == 100
    assert world.start().spec.on_drift is DriftPolicy.FAIL


async def test_a_wrong_request_is_refused_field_by_field_and_calls_nobody(new_world: type[World]) -> None:
    world = new_world()
    with pytest.raises(InvalidRequest) as refused:
        world.wish(a_wish(rollout_id=" ", messages=(), limits=Limits(turns=0)))
    assert [v.field for v in refused.value.violations] == ["spec.rollout_id", "spec.messages", "spec.limits.turns"]
    with pytest.raises(NotPossible):
        world.wish(a_wish("k" * 257))
    assert world.opened == []


async def test_together_or_later_the_same_id_and_payload_find_the_same_rollout(new_world: type[World]) -> None:
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
async def test_the_same_id_with_another_payload_is_a_conflict(new_world: type[World], fields: dict[str, Any]) -> None:
    world = new_world(Looping(), Other())
    rollout, _ = world.wish(a_wish("key", metadata_json='{"a": 1}'))
    for _ in range(2):
        with pytest.raises(Conflict) as refused:
            world.wish(a_wish("key", **{"metadata_json": '{"a": 1}', **fields}))
        assert refused.value.reason == "REQUEST_ID_TAKEN"
        await outcome_of(rollout)
    assert len(world.rollouts) == 1


async def test_what_only_concerns_waiting_or_writing_is_no_other_payload(new_world: type[World]) -> None:
    world = new_world()
    rollout, _ = world.wish(a_wish("key", metadata_json='{"a": 1, "b": [2]}'))
    same = a_wish("key", metadata_json='{"b":[2],"a":1}', cancel_after_detach=5, agent="looping")
    assert world.wish(same) == (rollout, True)


async def test_ids_of_other_callers_trainers_and_none_at_all_are_others(new_world: type[World]) -> None:
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


async def test_until_received_an_id_attaches_while_its_rollout_runs(new_world: type[World]) -> None:
    world = new_world()
    wish = a_wish("key", until_received=True)
    world.scripts["r"] = world.scripts.setdefault("r", type(world.script(world.start()))(BLOCKED))
    rollout, _ = world.wish(wish)
    assert world.wish(wish) == (rollout, True)
    with pytest.raises(Conflict):
        world.wish(a_wish("key", until_received=True, priority=1))


async def finished_until_received(world: World) -> Rollout:
    rollout, _ = world.wish(a_wish("key", until_received=True))
    await outcome_of(rollout)
    return rollout


async def test_until_received_an_outcome_that_nobody_received_is_handed_out(new_world: type[World]) -> None:
    world = new_world()
    rollout = await finished_until_received(world)
    assert world.wish(a_wish("key", until_received=True)) == (rollout, True)


async def test_until_received_an_id_is_free_once_the_outcome_was(new_world: type[World]) -> None:
    world = new_world()
    rollout = await finished_until_received(world)
    world.roster.acknowledge(rollout.uid, "me")
    again, found = world.wish(a_wish("key", until_received=True))
    assert not found
    assert again is not rollout
    assert world.wish(a_wish("key", until_received=True)) == (again, True)
    assert {found.uid for _, found in world.roster.select(ALL)} == {rollout.uid, again.uid}


@pytest.mark.parametrize("received", [False, True])
async def test_until_received_another_payload_starts_anew_after_the_end(new_world: type[World], received: bool) -> None:
    world = new_world()
    rollout = await finished_until_received(world)
    if received:
        world.roster.acknowledge(rollout.uid, "me")
    again, found = world.wish(a_wish("key", until_received=True, priority=1))
    assert (found, again is rollout) == (False, False)


async def test_forgetting_the_first_rollout_of_an_id_leaves_the_second_one_its_id(new_world: type[World]) -> None:
    world = new_world(capacity=Capacity(finished=1))
    first = await finished_until_received(world)
    world.roster.acknowledge(first.uid, "me")
    second = await finished_until_received(world)
    await asyncio.sleep(1)
    assert [rollout for _, rollout in world.roster.select(ALL)] == [second]
    assert world.wish(a_wish("key", until_received=True)) == (second, True)


async def test_attaching_may_bring_a_new_credential_and_the_end_drops_it(new_world: type[World]) -> None:
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
    assert [ask.credential for ask in world.script(named).asks] == ["", "new"]
    assert named.credentials == Credentials()
    assert "new" not in repr(world.script(named).asks)


async def test_callers_see_their_own(new_world: type[World]) -> None:
    world = new_world()
    mine, other = world.start(), world.start(caller="other")
    assert world.roster.get(mine.uid, "me") is mine
    for uid in (other.uid, "nobody"):
        with pytest.raises(NotFound) as missing:
            world.roster.get(uid, "me")
        assert missing.value.reason == "ROLLOUT_NOT_FOUND"
        with pytest.raises(NotFound):
            world.roster.acknowledge(uid, "me")
    assert [rollout for _, rollout in world.roster.select(ALL)] == [mine]
    assert [*world.roster.select(Selection("me", uids=(other.uid,)))] == []


async def test_what_has_not_finished_cannot_be_acknowledged(new_world: type[World]) -> None:
    world = new_world()
    rollout = world.start()
    with pytest.raises(NotPossible) as refused:
        world.roster.acknowledge(rollout.uid, "me")
    assert refused.value.reason == "ROLLOUT_NOT_FINISHED"
    await outcome_of(rollout)
    world.roster.acknowledge(rollout.uid, "me")
    world.roster.acknowledge(rollout.uid, "me")
    assert rollout.received


async def test_rollouts_are_selected_by_every_condition_that_is_set(new_world: type[World]) -> None:
    world = new_world(Looping(), Other(), capacity=Capacity(running=2))
    a = world.start(BLOCKED, rollout_id="a", group_id="g", labels={"x": "1", "y": "1"})
    b = world.start(rollout_id="b", group_id="g", agent="other", labels={"x": "1"})
    c = world.start(rollout_id="c", labels={"x": "2"})
    await outcome_of(b)

    def selected(**conditions: object) -> list[Rollout]:
        return [rollout for _, rollout in world.roster.select(Selection("me", **conditions))]  # type: ignore[arg-type]

    assert selected() == [c, b, a]
    assert selected(uids=(a.uid, c.uid, "nobody", a.uid)) == [c, a]
    assert selected(rollout_ids=("a", "b")) == [b, a]
    assert selected(group_id="g") == [b, a]
    assert selected(agent="other") == [b]
    assert selected(labels={"x": "1"}) == [b, a]
    assert selected(labels={"x": "1", "y": "1"}) == [a]
    assert selected(states=(RolloutState.RUNNING,)) == [a]
    assert selected(states=(RolloutState.QUEUED, RolloutState.FINISHED)) == [c, b]
    assert selected(uids=(b.uid,), states=(RolloutState.RUNNING,)) == []


async def test_pages_miss_nothing_and_repeat_nothing_while_rollouts_come_and_go(new_world: type[World]) -> None:
    world = new_world(capacity=Capacity(running=1, finished=3))
    stays = [world.start(BLOCKED) for _ in range(10)]
    goes = stays[5]
    seen: list[Rollout] = []
    before: int | None = None
    while page := [pair for pair, _ in zip(world.roster.select(ALL, before=before), range(3), strict=False)]:
        seen.extend(rollout for _, rollout in page)
        before = page[-1][0]
        world.start(BLOCKED)
        world.roster.cancel(Selection("me", uids=(goes.uid,)), "")
        await asyncio.sleep(1)
    assert [rollout.uid for rollout in seen if rollout is not goes] == [r.uid for r in reversed(stays) if r is not goes]


async def test_finished_rollouts_are_forgotten_by_age(new_world: type[World]) -> None:
    world = new_world(capacity=Capacity(finished_seconds=60))
    early, running = world.start(), world.start(Say("8", seconds=100))
    await outcome_of(early)
    await asyncio.sleep(59)
    world.roster.forget()
    assert world.roster.get(early.uid, "me") is early
    await asyncio.sleep(2)
    world.roster.forget()
    with pytest.raises(NotFound):
        world.roster.get(early.uid, "me")
    assert [rollout for _, rollout in world.roster.select(ALL)] == [running]
    assert (await outcome_of(running)).end == Stop("stop")


async def test_finished_rollouts_are_forgotten_by_number_those_that_finished_first(new_world: type[World]) -> None:
    world = new_world(capacity=Capacity(finished=2))
    slow, *rest = [world.start(Say("8", seconds=10 - second)) for second in range(4)]
    await outcome_of(slow)
    await asyncio.sleep(1)
    assert [rollout for _, rollout in world.roster.select(ALL)] == [rest[0], slow]
    assert world.roster.finished == 4


async def test_a_forgotten_id_starts_anew(new_world: type[World]) -> None:
    world = new_world(capacity=Capacity(finished=0))
    rollout, _ = world.wish(a_wish("key"))
    outcome = await outcome_of(rollout)
    await asyncio.sleep(1)
    again, found = world.wish(a_wish("key", priority=1))
    assert (found, again is rollout) == (False, False)
    assert outcome.end == Stop("stop")


async def test_those_that_were_cancelled_in_the_queue_are_forgotten_too(new_world: type[World]) -> None:
    world = new_world(capacity=Capacity(running=1, finished=1))
    world.start(BLOCKED)
    queued = [world.start() for _ in range(3)]
    await asyncio.sleep(1)
    world.roster.cancel(Selection("me", states=(RolloutState.QUEUED,)), "")
    for rollout in queued:
        assert (await outcome_of(rollout)).end == Cancellation("")
    assert len([*world.roster.select(ALL)]) == 2


def test_a_wish_shows_no_credentials() -> None:
    assert "hunter2" not in repr(Wish(a_spec(), "me", credentials=Credentials("hunter2", "hunter2", "hunter2")))


async def test_finished_rollouts_are_bounded_in_bytes_too(new_world: type[World]) -> None:
    """The oldest are forgotten first; one that is larger than all the room is forgotten at once."""
    small = new_world()
    size = await size_of_one(small)
    world = new_world(capacity=Capacity(finished_bytes=2 * size))
    for _ in range(4):
        await outcome_of(world.start())
        await asyncio.sleep(1)
    assert len([*world.roster.select(Selection("me"))]) == 2
    none = new_world(capacity=Capacity(finished_bytes=size - 1))
    await outcome_of(none.start())
    await asyncio.sleep(1)
    assert [*none.roster.select(Selection("me"))] == []


async def size_of_one(world: World) -> int:
    rollout = world.start()
    await outcome_of(rollout)
    return rollout.machine.size

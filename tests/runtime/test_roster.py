"""The registry: admission, queueing, deduplication, visibility, and retention."""

from __future__ import annotations

import asyncio

import pytest
from rollout_server import Limits
from rollout_server.core.error import Busy, Draining, InvalidRequest, NotFound, NotPossible
from rollout_server.core.limits import CALLS_PER_TURN
from rollout_server.core.spec import Dialect, DriftPolicy
from rollout_server.core.spec_validation import Bounds
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import Rollout, RolloutState
from rollout_server.runtime.start_request import Capacity

from tests.support.runtime_harness import FOREVER, ME, Looping, RuntimeHarness, Say, a_wish, outcome_of

BLOCKED = Say(seconds=FOREVER)


ALL = Selection(ME)


class Other(Looping):
    """Another agent."""

    name = "other"
    limits = Limits(turns=3, seconds=30)


async def test_a_rollout_goes_from_queued_over_running_to_finished(new_world: type[RuntimeHarness]) -> None:
    world = new_world(capacity=Capacity(running=1))
    first, second = world.start(Say("8", seconds=10)), world.start(Say("8", seconds=10))
    assert (first.state, second.state) == (RolloutState.RUNNING, RolloutState.QUEUED)
    assert (world.roster.running, world.roster.queued, world.roster.totals.finished) == (1, 1, 0)
    await outcome_of(first)
    await asyncio.sleep(1)
    assert (first.state, second.state) == (RolloutState.FINISHED, RolloutState.RUNNING)
    assert (world.roster.running, world.roster.queued, world.roster.totals.finished) == (1, 0, 1)
    outcome = await outcome_of(second)
    assert outcome.metrics.queued_ms == pytest.approx(10_000)
    assert second.finished == pytest.approx(second.created + 20)


async def test_those_who_wait_run_by_priority_and_then_by_age(new_world: type[RuntimeHarness]) -> None:
    world = new_world(capacity=Capacity(running=1))
    rollouts = [
        world.start(Say("8", seconds=1), rollout_id=f"{priority}{letter}", priority=priority)
        for letter, priority in zip("abcdef", (0, 0, 5, -1, 5, 0), strict=True)
    ]
    for rollout in rollouts:
        await outcome_of(rollout)
    assert world.opened == ["0a", "5c", "5e", "0b", "0f", "-1d"]


async def test_one_more_than_can_wait_is_refused_and_can_come_again(new_world: type[RuntimeHarness]) -> None:
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


async def test_who_is_known_is_found_even_where_nobody_new_is_taken(new_world: type[RuntimeHarness]) -> None:
    world = new_world(capacity=Capacity(running=1, queued=0))
    rollout, _ = world.wish(a_wish("key"))
    assert world.wish(a_wish("key")) == (rollout, True)
    await world.roster.drain(60)
    assert world.wish(a_wish("key")) == (rollout, True)


async def test_a_server_that_drains_takes_nobody(new_world: type[RuntimeHarness]) -> None:
    world = new_world()
    await world.roster.drain(0)
    with pytest.raises(Draining) as refused:
        world.start()
    assert refused.value.reason == "DRAINING"
    assert [*world.roster.select(ALL)] == []


async def test_the_agent_is_the_named_one_or_the_first(new_world: type[RuntimeHarness]) -> None:
    world = new_world(Looping(), Other())
    assert world.start().agent.name == "looping"
    other = world.start(agent="other", limits=Limits(turns=5))
    assert other.spec.agent == "other"
    assert other.spec.limits == Limits(turns=3, seconds=30, calls_per_turn=CALLS_PER_TURN)
    with pytest.raises(NotFound) as missing:
        world.start(agent="third")
    assert missing.value.reason == "AGENT_NOT_FOUND"
    assert "['looping', 'other']" in missing.value.message


async def test_what_a_request_leaves_open_is_filled_in(new_world: type[RuntimeHarness]) -> None:
    world = new_world(bounds=Bounds(seconds=100, default_seconds={Dialect.GRPC: 50}, on_drift=DriftPolicy.FAIL))
    assert world.start().spec.limits.seconds == 50
    assert world.start(limits=Limits(seconds=7)).spec.limits.seconds == 7
    assert world.start(limits=Limits(seconds=700)).spec.limits.seconds == 100
    assert world.start().spec.on_drift is DriftPolicy.FAIL


async def test_a_wrong_request_is_refused_field_by_field_and_calls_nobody(new_world: type[RuntimeHarness]) -> None:
    world = new_world()
    with pytest.raises(InvalidRequest) as refused:
        world.wish(a_wish("k" * 257, rollout_id=" ", messages=(), limits=Limits(turns=0)))
    wrong = ["spec.rollout_id", "spec.messages", "spec.limits.turns", "request_id"]
    assert [v.field for v in refused.value.violations] == wrong
    assert world.opened == []


async def test_callers_see_their_own(new_world: type[RuntimeHarness]) -> None:
    world = new_world()
    mine, other = world.start(), world.start(caller="other")
    assert world.roster.get(mine.uid, ME) is mine
    for uid in (other.uid, "nobody"):
        with pytest.raises(NotFound) as missing:
            world.roster.get(uid, ME)
        assert missing.value.reason == "ROLLOUT_NOT_FOUND"
        with pytest.raises(NotFound):
            world.roster.acknowledge(uid, ME)
    assert [rollout for _, rollout in world.roster.select(ALL)] == [mine]
    assert [*world.roster.select(Selection(ME, uids=(other.uid,)))] == []


async def test_what_has_not_finished_cannot_be_acknowledged(new_world: type[RuntimeHarness]) -> None:
    world = new_world()
    rollout = world.start()
    with pytest.raises(NotPossible) as refused:
        world.roster.acknowledge(rollout.uid, ME)
    assert refused.value.reason == "ROLLOUT_NOT_FINISHED"
    await outcome_of(rollout)
    world.roster.acknowledge(rollout.uid, ME)
    world.roster.acknowledge(rollout.uid, ME)
    assert rollout.received


async def test_rollouts_are_selected_by_every_condition_that_is_set(new_world: type[RuntimeHarness]) -> None:
    world = new_world(Looping(), Other(), capacity=Capacity(running=2))
    a = world.start(BLOCKED, rollout_id="a", group_id="g", labels={"x": "1", "y": "1"})
    b = world.start(rollout_id="b", group_id="g", agent="other", labels={"x": "1"})
    c = world.start(rollout_id="c", labels={"x": "2"})
    await outcome_of(b)

    def selected(**conditions: object) -> list[Rollout]:
        return [rollout for _, rollout in world.roster.select(Selection(ME, **conditions))]  # type: ignore[arg-type]

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


async def test_pages_miss_nothing_and_repeat_nothing_while_rollouts_come_and_go(
    new_world: type[RuntimeHarness],
) -> None:
    world = new_world(capacity=Capacity(running=1, finished=3))
    stays = [world.start(BLOCKED) for _ in range(10)]
    goes = stays[5]
    seen: list[Rollout] = []
    before: int | None = None
    while True:
        page = await world.roster.pages.page(ALL, before, 3)
        seen.extend(rollout for _, rollout in page.rollouts)
        before = page.next_before
        if before is None:
            break
        world.start(BLOCKED)
        world.roster.cancel(Selection(ME, uids=(goes.uid,)), "")
        await asyncio.sleep(1)
    assert [rollout.uid for rollout in seen if rollout is not goes] == [r.uid for r in reversed(stays) if r is not goes]


async def test_only_its_own_methods_change_a_rollout(new_world: type[RuntimeHarness]) -> None:
    rollout = new_world().start(Say("8"))
    for name in ("running", "received", "held", "delivery", "credentials", "deadline", "finished", "owes", "outcome"):
        with pytest.raises(AttributeError):
            setattr(rollout, name, None)

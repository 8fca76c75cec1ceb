"""Groups that one call starts: all or nothing, early stop, refills, resumable items, and retention with their rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_server.core.error import Busy, Conflict, Draining, Gone, InvalidRequest, NotFound
from rollout_server.core.outcome import Cancellation, Category, End, Failure, FailureClass, Stop
from rollout_server.runtime.groups.group import EARLY_STOP
from rollout_server.runtime.groups.state import GroupPlan, GroupResult, GroupState
from rollout_server.runtime.ports import Credentials
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import RolloutState
from rollout_server.runtime.start_request import Capacity, Quota, StartRequest

from tests.support.group_harness import SLOW, GroupHarness, finished, items
from tests.support.runtime_harness import ADMIN, FOREVER, ME, OTHER, Say, a_spec, limits

BROKEN = Say(failure=Failure(Category.NETWORK, "nobody there"))


async def test_a_group_has_ids_indices_and_a_result(harness: Callable[..., GroupHarness]) -> None:
    group = harness().start_group(3)
    assert group.id.rpartition("-")[0] == group.members[0].uid.rpartition("-")[0]
    assert [(each.spec.rollout_id, each.spec.group_index, each.spec.group_id) for each in group.members] == [
        (f"g/{index}", index, group.id) for index in range(3)
    ]
    assert await finished(group) == GroupResult(3, 3, 0, 3, 0, 0, early_stop=False)


async def test_a_group_starts_as_a_whole_or_not_at_all(harness: Callable[..., GroupHarness]) -> None:
    world = harness(capacity=Capacity(running=2, queued=3))
    world.says(_0=Say(seconds=FOREVER))
    world.start_group(1)
    with pytest.raises(Busy, match="no room for 5 more"):
        world.start_group(5)
    assert (world.roster.running, world.roster.queued) == (1, 0)
    assert len(world.start_group(4).members) == 4
    await world.roster.drain(0)
    with pytest.raises(Draining):
        world.start_group(1)


@pytest.mark.parametrize(
    ("plan", "fields", "field"),
    [
        (GroupPlan(0), {}, "count"),
        (GroupPlan(6), {}, "count"),
        (GroupPlan(2, 3), {}, "min_usable"),
        (GroupPlan(2, 0, 1025), {}, "refill"),
        (GroupPlan(2), {"group_index": 0}, "spec.group_index"),
        (GroupPlan(2), {"rollout_id": "r" * 255}, "spec.rollout_id"),
        (GroupPlan(2), {"rollout_id": " "}, "spec.rollout_id"),
    ],
)
async def test_what_is_wrong_with_a_request_is_named(
    harness: Callable[..., GroupHarness], plan: GroupPlan, fields: dict[str, object], field: str
) -> None:
    world = harness(capacity=Capacity(running=2, queued=3))
    with pytest.raises(InvalidRequest) as raised:
        world.start_request(StartRequest(a_spec(**fields), "me"), plan)
    assert [violation.field for violation in raised.value.violations] == [field]


async def test_a_group_has_to_fit_into_the_callers_quota(harness: Callable[..., GroupHarness]) -> None:
    world = harness(capacity=Capacity(running=2, queued=30, per_caller=Quota(running=1, queued=2)))
    assert len(world.start_group(3).members) == 3
    with pytest.raises(InvalidRequest, match="groups of 1 to 3 rollouts"):
        world.start_group(4)


async def test_a_repeated_request_finds_the_group(harness: Callable[..., GroupHarness]) -> None:
    world = harness()
    world.says(_0=Say(seconds=SLOW))
    group = world.start_group(2, "key", 1, 1)
    again = StartRequest(a_spec(rollout_id="g"), "me", "key", credentials=Credentials("new"))
    assert world.start_request(again, GroupPlan(2, 1, 1)) == (group, True)
    assert {each.credentials.completions for each in group.members} == {"new"}
    for plan, fields in ((GroupPlan(3, 1, 1), {}), (GroupPlan(2, 1, 1), {"priority": 1}), (GroupPlan(2, 1, 2), {})):
        with pytest.raises(Conflict, match="another payload"):
            world.start_request(StartRequest(a_spec(**{"rollout_id": "g", **fields}), "me", "key"), plan)
    assert world.start_group(2, "key", 1, 1, caller="other") is not group
    await finished(group)
    assert world.start_request(again, GroupPlan(2, 1, 1)) == (group, True)
    assert group.admitted.request.credentials == Credentials()


async def test_two_groups_of_a_caller_have_different_ids(harness: Callable[..., GroupHarness]) -> None:
    world = harness()
    group, others = world.start_group(1, group_id="mine"), world.start_group(1, group_id="mine", caller="other")
    with pytest.raises(Conflict, match="another group 'mine'"):
        world.start_group(1, group_id="mine")
    assert world.groups.get("mine", ME) is group
    assert world.groups.get("mine", OTHER) is others
    assert world.groups.get("mine", ADMIN) is others
    with pytest.raises(NotFound):
        world.groups.get(world.start_group(1).id, OTHER)


async def test_enough_usable_rollouts_end_the_group(harness: Callable[..., GroupHarness]) -> None:
    world = harness()
    world.says(_0=Say(seconds=FOREVER), _1=Say(seconds=FOREVER))
    group = world.start_group(4, min_usable=2)
    assert await finished(group) == GroupResult(4, 2, 0, 2, 0, 2, early_stop=True)
    ends = [each.outcome.end for each in group.members if each.outcome is not None]
    assert ends == [Cancellation(EARLY_STOP), Cancellation(EARLY_STOP), Stop("stop"), Stop("stop")]


async def test_a_time_limit_is_usable_and_a_broken_trainer_is_not(harness: Callable[..., GroupHarness]) -> None:
    world = harness(capacity=Capacity(running=3))
    world.says(_0=Say(seconds=FOREVER), _1=BROKEN, _2=Say(seconds=FOREVER), _3=Say(seconds=2))
    group = world.start_group(4, min_usable=2, **limits(seconds=5.0))
    found = await items(group)
    assert found[:2] == [(1, 1, False, False), (2, 3, True, False)]
    assert found[2] in ((3, 0, True, False), (3, 2, True, False))
    result = found[-1]
    assert isinstance(result, GroupResult)
    assert (result.usable, result.completed, result.failed + result.cancelled) in ((2, 1, 3), (3, 1, 3))


async def test_queued_rollouts_of_a_group_with_enough_never_run(harness: Callable[..., GroupHarness]) -> None:
    world = harness(capacity=Capacity(running=1))
    group = world.start_group(4, min_usable=1)
    assert await finished(group) == GroupResult(4, 1, 0, 1, 0, 3, early_stop=True)
    assert world.opened == ["g/0"]


async def test_refills_replace_failed_rollouts_within_their_bound(harness: Callable[..., GroupHarness]) -> None:
    world = harness(capacity=Capacity(running=1))
    world.says(_0=BROKEN, _0_r1=BROKEN, _1=BROKEN, _2=BROKEN, _2_r3=BROKEN)
    group = world.start_group(4, refill=3)
    assert await items(group) == [
        (1, 0, False, True),
        (2, 1, False, True),
        (3, 2, False, True),
        (4, 3, True, False),
        (5, 0, False, False),
        (6, 1, True, False),
        (7, 2, False, False),
        GroupResult(4, 2, 3, 2, 2, 0, early_stop=False),
    ]
    assert world.opened == ["g/0", "g/1", "g/2", "g/3", "g/0/r1", "g/1/r2", "g/2/r3"]
    assert [each.spec.group_index for each in group.members] == [0, 1, 2, 3]


async def test_a_cancelled_rollout_is_not_started_anew(harness: Callable[..., GroupHarness]) -> None:
    world = harness()
    world.says(_0=Say(seconds=FOREVER), _1=BROKEN)
    group = world.start_group(2, refill=5)
    world.says(_1_r1=Say(seconds=FOREVER))
    await asyncio.sleep(1)
    assert group.members[1].spec.rollout_id == "g/1/r1"
    assert sorted(world.roster.cancel(Selection(ME, group_id=group.id), "stop")) == sorted(
        each.uid for each in group.members
    )
    assert await finished(group) == GroupResult(2, 0, 1, 0, 0, 2, early_stop=False)


async def test_a_rollout_whose_time_limit_is_not_usable_is_started_anew(harness: Callable[..., GroupHarness]) -> None:
    world = harness()
    world.says(_0=Say(seconds=FOREVER))
    request = StartRequest(a_spec(rollout_id="g", **limits(seconds=5.0)), "me")
    group, _ = world.start_request(request, GroupPlan(1, refill=1, train_on=frozenset({FailureClass.POLICY})))
    assert await finished(group) == GroupResult(1, 1, 1, 1, 0, 0, early_stop=False)


async def test_a_drain_starts_nothing_anew(harness: Callable[..., GroupHarness]) -> None:
    world = harness()
    world.says(_0=Say(seconds=3, failure=BROKEN.failure), _1=Say(seconds=FOREVER))
    group = world.start_group(2, refill=5)
    await world.roster.drain(10)
    assert await finished(group) == GroupResult(2, 0, 0, 0, 2, 0, early_stop=False)


async def test_the_items_of_a_group_resume_at_any_number(harness: Callable[..., GroupHarness]) -> None:
    world = harness()
    world.says(_0=Say(seconds=2), _1=Say(seconds=1), _2=BROKEN)
    group = world.start_group(3, refill=1)
    whole = await items(group)
    assert [each[:2] for each in whole[:-1]] == [(1, 2), (2, 2), (3, 1), (4, 0)]  # type: ignore[index]
    assert group.last_sequence == 5
    for after in range(6):
        assert await items(group, after) == whole[after:]
    with pytest.raises(Gone):
        await items(group, 6)


async def test_a_watcher_is_attached_to_all_rollouts_also_new_ones(harness: Callable[..., GroupHarness]) -> None:
    world = harness()
    world.says(_0=Say(seconds=5, failure=BROKEN.failure), _0_r1=Say(seconds=5), _1=Say(seconds=5))
    group = world.start_group(2, refill=1, cancel_after_detach=1.0)
    with group.attached():
        result = await finished(group)
    assert result == GroupResult(2, 2, 1, 2, 0, 0, early_stop=False)
    world.says(_0=Say(seconds=5), _1=Say(seconds=5))
    assert (await finished(world.start_group(2, cancel_after_detach=1.0))).cancelled == 2


async def test_a_group_lives_as_long_as_its_rollouts(harness: Callable[..., GroupHarness]) -> None:
    world = harness(capacity=Capacity(running=2, finished=3, finished_seconds=100))
    world.says(_1=Say(seconds=SLOW))
    group = world.start_group(2, "key", group_id="mine")
    await asyncio.sleep(500)
    world.roster.forget()
    assert group.members[0].state is RolloutState.FINISHED
    assert world.groups.get("mine", ME) is group  # its first rollout ended long ago, but the group has not
    await finished(group)
    await asyncio.sleep(50)
    assert world.roster.get(group.members[0].uid, ME) is group.members[0]
    await asyncio.sleep(100)
    world.roster.forget()
    with pytest.raises(NotFound):
        world.groups.get("mine", ME)
    world.dropped = 2
    assert world.start_group(2, "key", group_id="mine") is not group


async def test_what_is_left_of_an_old_group_leaves_a_new_one_alone(harness: Callable[..., GroupHarness]) -> None:
    world = harness(capacity=Capacity(finished=3))
    old = world.start_group(3, "key", group_id="mine")
    await finished(old)
    await asyncio.sleep(1)
    world.start()
    await asyncio.sleep(1)  # this drops the first rollout of the group, and so the group
    new = world.start_group(3, "key", group_id="mine")
    assert new is not old
    await finished(new)
    await asyncio.sleep(1)  # this drops the other rollouts of the old group
    assert world.groups.get("mine", ME) is new
    assert world.start_group(3, "key", group_id="mine") is new
    world.dropped = 4


ENDS: tuple[End, ...] = (
    Stop("stop"),
    Cancellation("no"),
    Failure(Category.TIMEOUT, ""),
    Failure(Category.NETWORK, ""),
    Failure(Category.INTERNAL, ""),
)


@given(
    st.builds(
        GroupPlan,
        st.integers(1, 6),
        st.integers(0, 6),
        st.integers(0, 4),
        st.sampled_from([None, frozenset({FailureClass.TRAINER})]),
    ),
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(ENDS), st.booleans()), max_size=40),
)
def test_random_ends_keep_the_counts(plan: GroupPlan, ends: list[tuple[int, End, bool]]) -> None:
    state = GroupState.of(plan)
    for index, end, may_refill in ends:
        if index >= plan.count:
            continue
        before, state = state, state.after(index, end, may_refill=may_refill)
        refilled = state.refilled > before.refilled
        assert refilled <= (
            may_refill and isinstance(end, Failure) and not plan.is_usable(end) and not before.early_stop
        )
        assert state.ends[index] == (None if refilled else end)
        assert state.early_stop >= before.early_stop
    usable = sum(end is not None and plan.is_usable(end) for end in state.ends)
    assert state.refilled <= plan.refill
    assert (state.usable, state.is_complete) == (usable, None not in state.ends)
    if plan.min_usable and not (state.is_complete or state.early_stop):
        assert usable < plan.min_usable
    assert plan.min_usable or not state.early_stop
    if state.is_complete:
        result = state.result()
        assert result.asked == plan.count == result.completed + result.failed + result.cancelled
        assert result.usable == usable

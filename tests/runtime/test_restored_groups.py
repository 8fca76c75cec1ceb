"""Groups survive the process: their items go on, refills and early stops continue, and the reward is computed once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import pytest
from rollout_server.core.error import Conflict, NotFound, NotPossible, Unavailable
from rollout_server.core.outcome import Cancellation, Category, Failure, FailureClass, Stop
from rollout_server.core.record import Answered, Ended
from rollout_server.core.spec import Dialect, InterruptPolicy, Target
from rollout_server.runtime.groups.group import RolloutGroup
from rollout_server.runtime.groups.state import EARLY_STOP, GroupPlan, GroupResult
from rollout_server.runtime.journal import EntriesAppended, GroupDropped, GroupFormed, RolloutAccepted
from rollout_server.runtime.ports import CompletionRequest, Credentials
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.run.run import Run
from rollout_server.runtime.start_request import Capacity, StartRequest

from tests.support.group_harness import GroupHarness, Ranked, finished, items
from tests.support.journal import KeptJournal
from tests.support.runtime_harness import FOREVER, ME, Looping, Say, Script, a_spec, call, check_log, wait

REPLAYS = Target("grpc://trainer:1", Dialect.GRPC, replays_turn_keys=True)
BROKEN = Say(failure=Failure(Category.NETWORK, "nobody there"))
PLAN = GroupPlan(3, refill=2)


@pytest.fixture(autouse=True)
async def ended() -> AsyncIterator[None]:
    """End what the processes that have crashed would still run."""
    yield
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.wait(others)


class ByTurn(Script):
    """A sampler that returns its k-th completion in turn k, also if the turns before it were in another process."""

    async def sample(self, ask: CompletionRequest) -> Answered:
        say = self.says[min(ask.asked.turn, len(self.says)) - 1]
        await wait(say.seconds)
        if say.failure is not None:
            raise_failed(say.failure)
        return say.answer(ask.asked.turn)


def raise_failed(failure: Failure) -> None:
    """Fail as a trainer's endpoint does."""
    from rollout_server.runtime.errors import RolloutFailed

    raise RolloutFailed(failure)


@dataclass
class Mark:
    """A commit: how many changes are stored, and how many items of the group are published then."""

    changes: int
    items: int


class MarkedJournal(KeptJournal):
    """Notes each commit."""

    marks: list[Mark]
    group: RolloutGroup | None = None

    def commit(self) -> None:
        before = self.commits
        super().commit()
        if self.commits > before:
            mark = Mark(len(self.committed), 0 if self.group is None else self.group.last_sequence)
            self.marks = [*getattr(self, "marks", []), mark]


def scripted(harness: GroupHarness, **scripts: Sequence[Say]) -> None:
    """Set the completions of the rollouts of group "g" by suffix."""
    harness.scripts |= {"g" + name.replace("_", "/"): ByTurn(*says) for name, says in scripts.items()}


def a_request(request_id: str = "key", credential: str = "", **fields: object) -> StartRequest:
    """A request for the group "mine"."""
    spec = a_spec(**{"rollout_id": "g", "group_id": "mine", "completions": REPLAYS, **fields})
    return StartRequest(spec, "me", request_id, credentials=Credentials(credential))


def rewards(group: RolloutGroup) -> Sequence[float | None]:
    """The rewards of the current rollouts."""
    outcomes = [each.outcome for each in group.members]
    return [None if outcome is None else outcome.reward_result.reward for outcome in outcomes]


def started(harness: GroupHarness, plan: GroupPlan = PLAN, **fields: object) -> RolloutGroup:
    """Start the group of a harness."""
    group, found = harness.start_request(a_request(**fields), plan)  # type: ignore[arg-type]
    assert not found
    return group


CALLS = Say(calls=(call("none"),), seconds=1)
SCRIPTS = {
    "_0": (CALLS, Say("long answer", seconds=1)),
    "_1": (CALLS, replace(BROKEN, seconds=1)),
    "_1_r1": (CALLS, Say("short", seconds=3)),
    "_1_r2": (CALLS, Say("short", seconds=3)),
    "_2": (replace(BROKEN, seconds=2),),
    "_2_r1": (CALLS, CALLS, BROKEN),
    "_2_r2": (CALLS, CALLS, BROKEN),
}


@pytest.mark.parametrize("agent", [Looping, Ranked])
async def test_a_group_goes_on_after_a_crash_at_any_commit(agent: type[Looping]) -> None:
    """Two rollouts fail at the same time and are started anew; one of the refills fails, too."""
    journal = MarkedJournal()
    first = GroupHarness(agent(), journal=journal)
    scripted(first, **SCRIPTS)
    journal.group = group = started(first)
    undisturbed = await items(group)
    assert undisturbed[-1] == GroupResult(3, 2, 2, 2, 1, 0, early_stop=False)
    assert sorted(each[1] for each in undisturbed[:-1] if each[3]) == [1, 2]  # type: ignore[index]
    assert len(journal.marks) > 10
    for mark in journal.marks:
        first.roster.journal = KeptJournal(journal.committed[: mark.changes])
        judge = agent()
        second = await first.next_process(judge)
        again, found = second.start_request(a_request(), PLAN)
        assert found
        assert again is second.groups.get("mine", ME)
        assert again.members[0].uid == group.members[0].uid
        after = await items(again)
        assert after[: mark.items] == undisturbed[: mark.items]
        assert after[-1] == undisturbed[-1]
        assert await items(again, mark.items) == after[mark.items :]
        assert rewards(again) == rewards(group)
        assert again.created == group.created
        if isinstance(judge, Ranked):
            assert judge.groups == ([] if mark.items == len(undisturbed) else [[0, 1]])
        await check_quiet(second)


@pytest.mark.parametrize("agent", [Looping, Ranked])
async def test_an_early_stop_goes_on_after_a_crash_at_any_commit(agent: type[Looping]) -> None:
    journal = MarkedJournal()
    first = GroupHarness(agent(), journal=journal)
    scripted(first, _0=(Say("a", seconds=1),), _1=(CALLS, Say("bb", seconds=1)), _2=(Say(seconds=FOREVER),))
    plan = GroupPlan(4, min_usable=2, refill=1)
    scripted(first, _3=(CALLS, Say(seconds=FOREVER)))
    journal.group = group = started(first, plan)
    undisturbed = await items(group)
    assert undisturbed[-1] == GroupResult(4, 2, 0, 2, 0, 2, early_stop=True)
    for mark in journal.marks:
        first.roster.journal = KeptJournal(journal.committed[: mark.changes])
        second = await first.next_process(agent())
        again = second.groups.get("mine", ME)
        after = await items(again)
        assert after[: mark.items] == undisturbed[: mark.items]
        assert after[-1] == undisturbed[-1]
        assert rewards(again) == rewards(group)
        await check_quiet(second)


async def check_quiet(harness: GroupHarness) -> None:
    """Nothing runs, waits or is held, and the log of each rollout is whole."""
    await asyncio.sleep(1)
    roster = harness.roster
    assert (roster.running, roster.queued, roster.active_bytes) == (0, 0, 0)
    for _, rollout in roster.select(Selection(ME)):
        check_log(rollout)
        assert rollout.credentials == Credentials()


@pytest.mark.parametrize("resumable", [True, False])
async def test_rollouts_that_were_to_be_cancelled_do_not_run_again(resumable: bool) -> None:
    first = GroupHarness(journal=KeptJournal())
    scripted(first, _0=(Say("a", seconds=2),), _1=(CALLS, Say(seconds=FOREVER)))
    completions = replace(REPLAYS, replays_turn_keys=resumable)
    group = started(first, GroupPlan(2, min_usable=1), completions=completions)
    await asyncio.sleep(2.5)
    assert (await finished(group)).early_stop
    changes = first.roster.journal.committed  # type: ignore[attr-defined]
    ends = [at for at, each in enumerate(changes) if isinstance(each, EntriesAppended) and is_end(each)]
    first.roster.journal = KeptJournal(changes[: ends[-1]])  # without the cancelled one's
    second = await first.next_process()
    again = second.groups.get("mine", ME)
    assert await items(again) == await items(group)
    assert second.opened == []
    assert again.members[1].outcome is not None
    assert again.members[1].outcome.end == Cancellation(EARLY_STOP)
    assert again.members[1].outcome.metrics.total_ms > 0  # it ran in the first process


def is_end(change: EntriesAppended) -> bool:
    """Whether the change has the end of a rollout."""
    return isinstance(change.entries[-1].record, Ended)


async def test_a_watch_begins_before_the_rollouts_go_on() -> None:
    first = GroupHarness(journal=KeptJournal())
    scripted(first, _0=(Say("a"),), _1=(Say("b", seconds=FOREVER),))
    started(first, GroupPlan(2))
    await asyncio.sleep(1)
    second = await first.next_process(resumes=False)
    scripted(second, _1=(Say("b"),))
    group = second.groups.get("mine", ME)
    assert (group.last_sequence, group.result) == (1, None)
    followed = asyncio.create_task(items(group, 1))
    await asyncio.sleep(10)
    assert second.opened == []
    await second.groups.resume()
    assert await followed == [(2, 1, True, False), GroupResult(2, 2, 0, 2, 0, 0, early_stop=False)]


async def test_ids_of_groups_are_known_after_a_restart() -> None:
    first = GroupHarness(journal=KeptJournal())
    group = started(first, GroupPlan(2))
    unnamed, _ = first.start_request(a_request("other", group_id=""), GroupPlan(1))
    await finished(group)
    await finished(unnamed)
    second = await first.next_process()
    assert second.start_request(a_request(), GroupPlan(2))[1]
    for changed, plan in ((a_request(priority=1), GroupPlan(2)), (a_request(), GroupPlan(2, 1))):
        with pytest.raises(Conflict, match="another payload"):
            second.start_request(changed, plan)
    with pytest.raises(Conflict, match="another group 'mine'"):
        second.start_request(a_request("third"), GroupPlan(2))
    found, attached = second.start_request(a_request("other", group_id=""), GroupPlan(1))
    assert (found.id, attached) == (unnamed.id, True)
    with pytest.raises(Conflict, match="another payload"):
        second.start_request(a_request("other", group_id=unnamed.id), GroupPlan(1))


async def test_refills_after_a_restart_have_the_credentials_of_the_group() -> None:
    first = GroupHarness(journal=KeptJournal())
    scripted(first, _0=(Say("a"),), _1=(Say(seconds=FOREVER),))
    first.start_request(a_request(credential="secret"), GroupPlan(2, refill=1))
    await asyncio.sleep(1)
    second = await first.next_process()
    scripted(second, _1=(BROKEN,), _1_r1=(Say(seconds=FOREVER),))
    second.roster.cancel(Selection(ME), "not this one")
    third = await first.next_process(resumes=False)
    scripted(third, _1=(BROKEN,), _1_r1=(Say(seconds=FOREVER),))
    await third.groups.resume()
    await asyncio.sleep(1)
    refill = third.groups.get("mine", ME).members[1]
    assert (refill.spec.rollout_id, refill.credentials.completions) == ("g/1/r1", "secret")
    third.start_request(a_request(credential="newer"), GroupPlan(2, refill=1))
    assert refill.credentials.completions == "newer"


async def test_what_cannot_be_resumed_fails_and_is_started_anew_within_the_bound() -> None:
    plain = Target("grpc://trainer:1", Dialect.GRPC)  # does not replay turn keys
    first = GroupHarness(Ranked(), journal=KeptJournal())
    scripted(first, _0=(Say("a"),), _1=(Say(seconds=FOREVER),), _2=(Say(seconds=FOREVER),))
    started(first, GroupPlan(3, refill=1), completions=plain)
    await asyncio.sleep(1)
    agent = Ranked()
    second = await first.next_process(agent)
    group = second.groups.get("mine", ME)
    assert await finished(group) == GroupResult(3, 2, 1, 2, 1, 0, early_stop=False)
    assert agent.groups == [[0, 1]]
    assert isinstance(failed := group.members[2].outcome.end, Failure)  # type: ignore[union-attr]
    assert failed.category is Category.INTERRUPTED


async def test_a_server_without_the_agent_of_a_group_ends_it() -> None:
    class Other(Looping):
        name = "other"

    first = GroupHarness(journal=KeptJournal())
    scripted(first, _0=(Say("a"),), _1=(Say(seconds=FOREVER),))
    started(first, GroupPlan(2, refill=1))
    await asyncio.sleep(1)
    second = await first.next_process(Other())
    result = await finished(second.groups.get("mine", ME))
    assert result == GroupResult(2, 1, 0, 1, 1, 0, early_stop=False)


async def test_no_second_reward_is_computed_if_a_part_of_the_ends_is_missing() -> None:
    first = GroupHarness(Ranked(), journal=KeptJournal())
    scripted(first, _0=(Say("a"),), _1=(Say("bb"),))
    await finished(started(first, GroupPlan(2, refill=1)))
    changes = first.roster.journal.committed  # type: ignore[attr-defined]
    last = [each for each in changes if isinstance(each, EntriesAppended) and is_end(each)][-1]
    first.roster.journal = KeptJournal([each for each in changes if each is not last])
    agent = Ranked()
    second = await first.next_process(agent)
    group = second.groups.get("mine", ME)
    assert await finished(group) == GroupResult(2, 1, 0, 1, 1, 0, early_stop=False)
    assert agent.groups == []
    assert isinstance(end := group.members[1].outcome.end, Failure)  # type: ignore[union-attr]
    assert (end.category, end.failure_class) == (Category.INTERRUPTED, FailureClass.SERVER)
    assert "rollouts of its group had completed" in end.message


async def test_a_failed_reward_stays_failed() -> None:
    agent = Ranked()
    agent.failing = ValueError("no ranks")
    first = GroupHarness(agent, journal=KeptJournal())
    group = started(first, GroupPlan(2, refill=2))
    before = await items(group)
    second = await first.next_process(Ranked())
    assert await items(second.groups.get("mine", ME)) == before
    assert before[-1] == GroupResult(2, 0, 0, 0, 2, 0, early_stop=False)


async def test_a_drain_during_the_reward_leaves_it_to_the_next_process() -> None:
    agent = Ranked()
    agent.gate.clear()
    first = GroupHarness(agent, journal=KeptJournal())
    scripted(first, _0=(CALLS, Say("a")), _1=(Say("bb"),), _2=(BROKEN,), _2_r1=(CALLS, Say("ccc")))
    group = started(first, GroupPlan(3, refill=1))
    await asyncio.sleep(10)
    assert agent.groups == [[0, 1, 2]]
    await first.roster.drain(0)
    assert [each.outcome for each in group.members] == [None] * 3
    assert (first.roster.running, first.roster.queued) == (0, 0)
    second = await first.next_process(agent := Ranked())
    again = second.groups.get("mine", ME)
    assert await finished(again) == GroupResult(3, 3, 1, 3, 0, 0, early_stop=False)
    assert rewards(again) == [0.0, 1.0, 2.0]
    assert agent.groups == [[0, 1, 2]]
    await check_quiet(second)


async def test_what_a_drain_ends_is_started_anew_in_the_next_process() -> None:
    first = GroupHarness(journal=KeptJournal())
    plain = Target("grpc://trainer:1", Dialect.GRPC)
    scripted(first, _0=(Say(seconds=FOREVER),), _0_r1=(Say("a"),), _1=(Say("b"),))
    group = started(first, GroupPlan(2, refill=1), completions=plain)
    await asyncio.sleep(1)
    await first.roster.drain(0)
    refill = group.members[0]
    assert (refill.spec.rollout_id, refill.is_suspended) == ("g/0/r1", True)
    assert first.opened == ["g/0", "g/1"]
    second = await first.next_process()
    again = second.groups.get("mine", ME)
    assert again.members[0].uid == refill.uid
    assert await items(again) == [
        (1, 1, True, False),
        (2, 0, False, True),
        (3, 0, True, False),
        GroupResult(2, 2, 1, 2, 0, 0, early_stop=False),
    ]


async def test_a_dropped_group_stays_dropped() -> None:
    first = GroupHarness(journal=KeptJournal(), capacity=Capacity(finished=2))
    await finished(started(first, GroupPlan(3)))
    await asyncio.sleep(1)
    second = await first.next_process()
    with pytest.raises(NotFound):
        second.groups.get("mine", ME)
    assert not second.start_request(a_request(), GroupPlan(3))[1]
    third = await first.next_process(capacity=Capacity(finished=1))  # drops another rollout when it loads
    with pytest.raises(NotFound):
        third.groups.get("mine", ME)


async def test_a_group_is_dropped_with_its_rollouts_when_a_process_begins() -> None:
    first = GroupHarness(journal=KeptJournal())
    await finished(started(first, GroupPlan(3)))
    await asyncio.sleep(1)
    second = await first.next_process(capacity=Capacity(finished=2))
    await asyncio.sleep(1)
    with pytest.raises(NotFound):
        second.groups.get("mine", ME)
    changes = second.roster.journal.committed  # type: ignore[attr-defined]
    assert sum(isinstance(each, GroupDropped) for each in changes) == 1


async def test_the_finished_rollouts_of_an_unfinished_group_are_kept_by_a_restart() -> None:
    first = GroupHarness(journal=KeptJournal())
    scripted(first, _0=(Say("a"),), _1=(Say("b", seconds=FOREVER),))
    started(first, GroupPlan(2))
    await asyncio.sleep(1)
    second = await first.next_process(capacity=Capacity(finished=0), resumes=False)
    scripted(second, _1=(Say("b"),))
    group = second.groups.get("mine", ME)
    await second.groups.resume()
    assert (await finished(group)).usable == 2
    await asyncio.sleep(1)
    assert [*second.roster.select(Selection(ME))] == []
    assert second.roster.active_bytes == 0
    with pytest.raises(NotFound):
        second.groups.get("mine", ME)


@pytest.mark.parametrize("kind", [Looping, Ranked])
async def test_the_rollouts_of_a_group_that_is_not_complete_go_on_one_by_one(kind: type[Looping]) -> None:
    """Those whose group has a reward end, because the reward would be missing."""
    first = GroupHarness(kind(), journal=KeptJournal())
    group = started(first, GroupPlan(2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    changes = first.roster.journal.committed  # type: ignore[attr-defined]
    lost = group.members[0].uid
    kept = [each for each in changes if getattr(each, "uid", "") != lost and not is_start(each, lost)]
    assert any(isinstance(each, GroupFormed) for each in kept)
    first.roster.journal = KeptJournal(kept)
    agent = kind()
    second = await first.next_process(agent)
    with pytest.raises(NotFound):
        second.groups.get("mine", ME)
    await asyncio.sleep(10)
    (rollout,) = [rollout for _, rollout in second.roster.select(Selection(ME))]
    assert rollout.outcome is not None
    if isinstance(agent, Ranked):
        assert isinstance(end := rollout.outcome.end, Failure)
        assert (end.category, agent.groups) == (Category.INTERRUPTED, [])
        assert "lost rollouts of its group" in end.message
    else:
        assert rollout.outcome.end == Stop("stop")
    changes = second.roster.journal.committed  # type: ignore[attr-defined]
    assert sum(isinstance(each, GroupDropped) for each in changes) == 1


def is_start(change: object, uid: str) -> bool:
    """Whether the change is the acceptance of this rollout."""
    return isinstance(change, RolloutAccepted) and change.start.uid == uid


async def test_a_group_that_callers_cannot_find_is_rewarded_after_a_restart() -> None:
    """Trainer streams form such groups."""
    first = GroupHarness(Ranked(), journal=KeptJournal())
    scripted(first, _0=(CALLS, Say("a")), _1=(CALLS, CALLS, Say("bb")))
    plan = GroupPlan(2)
    RolloutGroup("unlisted", first.groups.admit(a_request(), plan), plan, first.roster).start()
    await asyncio.sleep(1.5)
    second = await first.next_process(agent := Ranked(), capacity=Capacity(finished=2))
    with pytest.raises(NotFound):
        second.groups.get("mine", ME)
    await asyncio.sleep(10)
    ends = [rollout.outcome for _, rollout in second.roster.select(Selection(ME))]
    assert [end.reward_result.reward for end in ends if end is not None] == [1.0, 0.0]
    assert agent.groups == [[0, 1]]
    second.start(Say("more"))
    await asyncio.sleep(10)
    assert isinstance(second.roster.journal.committed[-1], GroupDropped)  # type: ignore[attr-defined]


@pytest.mark.parametrize("agent", [Looping, Ranked])
async def test_a_group_that_could_not_be_stored_is_forgotten(agent: type[Looping]) -> None:
    journal = KeptJournal()
    journal.paused = True
    harness = GroupHarness(agent(), journal=journal, capacity=Capacity(running=1))
    group = started(harness, GroupPlan(2))
    accepted = [asyncio.create_task(harness.groups.accept(group)) for _ in "12"]
    watched = asyncio.create_task(items(group))
    await asyncio.sleep(1)
    journal.fail("the disk is full")
    for task in (*accepted, watched):
        with pytest.raises(Unavailable, match="the disk is full"):
            await task
    with pytest.raises(NotFound):
        harness.groups.get("mine", ME)
    with pytest.raises(Unavailable):
        await items(group)
    journal.paused = False
    journal.fail("")
    await asyncio.sleep(10)
    assert (harness.roster.running, harness.roster.queued, harness.roster.active_bytes) == (0, 0, 0)
    again = started(harness, GroupPlan(2))
    assert (await finished(again)).completed == 2
    second = await harness.next_process(agent())
    assert await items(second.groups.get("mine", ME)) == await items(again)
    assert len([*second.roster.select(Selection(ME))]) == 2


async def test_a_full_disk_does_not_refuse_the_refills_of_a_stored_group() -> None:
    journal = KeptJournal()
    harness = GroupHarness(journal=journal)
    scripted(harness, _0=(replace(BROKEN, seconds=5),))
    group = started(harness, GroupPlan(1, refill=1))
    await harness.groups.accept(group)
    await asyncio.sleep(1)
    journal.paused = True
    await asyncio.sleep(10)
    assert group.members[0].spec.rollout_id == "g/0/r1"
    accepted = asyncio.create_task(harness.groups.accept(group))
    await asyncio.sleep(1)
    journal.fail("the disk is full")
    with pytest.raises(Unavailable):
        await accepted
    journal.paused = False
    journal.fail("")
    assert (await finished(group)).completed == 1


async def test_the_order_of_the_items_does_not_depend_on_the_clock() -> None:
    first = GroupHarness(journal=KeptJournal())
    scripted(first, _0=(Say("a", seconds=2),), _1=(Say("b", seconds=1),), _2=(Say("c", seconds=2),))
    group = started(first, GroupPlan(3))
    clock = group.members[0].clock
    await asyncio.sleep(1.5)
    late = replace(clock, monotonic=lambda: clock.monotonic() - 3600)
    group.members[0].clock = group.members[2].clock = late
    before = await items(group)
    assert before[0] == (1, 1, True, False)
    second = await first.next_process()
    assert await items(second.groups.get("mine", ME)) == before


async def test_a_group_with_a_reward_may_demand_to_be_resumed() -> None:
    class Own(Ranked):
        name = "own"

        async def play(self, run: Run) -> None:
            await super().play(run)

    resume = InterruptPolicy.RESUME
    assert started(GroupHarness(Ranked(), journal=KeptJournal()), on_interrupt=resume)
    with pytest.raises(NotPossible, match="play of agent 'own' cannot be replayed"):
        started(GroupHarness(Own(), journal=KeptJournal()), on_interrupt=resume)


async def test_a_restored_group_is_kept_from_its_end_on() -> None:
    """Its rollouts are kept together, and a repeated start finds it, although one of them ended long before."""
    capacity, plan = Capacity(finished_seconds=60), GroupPlan(2)
    first = GroupHarness(journal=KeptJournal(), capacity=capacity)
    scripted(first, _0=(Say("a"),), _1=(Say("b", seconds=90),))
    started(first, plan)
    await asyncio.sleep(1)
    for sleep in (100, 30):  # it ends in the second process, and has ended in the third one
        first = await first.next_process(capacity=capacity)
        await asyncio.sleep(sleep)
        first.roster.forget()
        group = first.groups.get("mine", ME)
        assert group.result is not None
        assert first.start_request(a_request(), plan) == (group, True)
    await asyncio.sleep(60)
    first.roster.forget()
    with pytest.raises(NotFound):
        first.groups.get("mine", ME)


@pytest.mark.parametrize("policy", [InterruptPolicy.FAIL, InterruptPolicy.UNSET])
async def test_a_drain_starts_nothing_anew_that_the_next_process_would_end(policy: InterruptPolicy) -> None:
    first = GroupHarness(journal=KeptJournal())
    scripted(first, _0=(Say(seconds=FOREVER),), _0_r1=(Say("a"),), _1=(Say("b"),))
    plain = Target("grpc://trainer:1", Dialect.GRPC)
    group = started(first, GroupPlan(2, refill=1), completions=plain, on_interrupt=policy)
    await asyncio.sleep(1)
    await first.roster.drain(0)
    second = await first.next_process()
    again, anew = second.groups.get("mine", ME), int(policy is InterruptPolicy.UNSET)
    assert await finished(again) == GroupResult(2, 1 + anew, anew, 1 + anew, 1 - anew, 0, early_stop=False)
    assert (len(group.rollouts), second.opened) == (2 + anew, ["g/0/r1"] * anew)

"""A durable journal: nothing is shown before it is stored, and the next process goes on with what was stored."""

from __future__ import annotations

import asyncio

import pytest
from rollout_server.core.error import Conflict, NotPossible, Unavailable
from rollout_server.core.limits import Limits
from rollout_server.core.outcome import Category, Failure, FailureClass, Stop
from rollout_server.core.record import Ended
from rollout_server.core.spec import Dialect, InterruptPolicy, Target
from rollout_server.runtime.groups.state import GroupResult
from rollout_server.runtime.outcome_delivery import DeliveryState
from rollout_server.runtime.registry.dependencies import DeliveryRetryPolicy
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import RolloutState
from rollout_server.runtime.run.run import Run
from rollout_server.runtime.start_request import Capacity

from tests.runtime.outcome_receivers import DOWN, YES, Receiver, owing, until
from tests.support.group_harness import GroupHarness, Ranked, items
from tests.support.journal import KeptJournal
from tests.support.machine_records import shown_outcome
from tests.support.runtime_harness import FOREVER, ME, Looping, RuntimeHarness, Say, Script, a_wish, call, outcome_of

ENDS = {"on_interrupt": InterruptPolicy.FAIL}


async def restored(journal: KeptJournal, *agents: Looping, **settings: object) -> RuntimeHarness:
    """The next process after a crash."""
    harness = RuntimeHarness(*agents, journal=journal.after_crash(), **settings)  # type: ignore[arg-type]
    await harness.restore()
    harness.rollouts = [rollout for _, rollout in harness.roster.select(Selection(ME))]
    return harness


async def test_records_are_seen_once_they_are_stored() -> None:
    journal = KeptJournal()
    harness = RuntimeHarness(journal=journal)
    journal.paused = True
    rollout = harness.start(Say("hello"))
    await asyncio.sleep(10)
    assert (rollout.log.last_sequence, rollout.outcome, rollout.state) == (0, None, RolloutState.RUNNING)
    while rollout.outcome is None:
        before = rollout.log.last_sequence
        journal.commit()
        assert rollout.log.last_sequence > before
        await asyncio.sleep(10)
    assert isinstance(rollout.outcome.end, Stop)
    assert harness.roster.totals.finished == 1


async def test_a_start_is_acknowledged_once_it_is_stored() -> None:
    journal = KeptJournal()
    journal.paused = True
    harness = RuntimeHarness(journal=journal)
    rollout = harness.start()
    accepted = asyncio.create_task(harness.roster.accept([rollout]))
    await asyncio.sleep(10)
    assert not accepted.done()
    journal.paused = False
    journal.commit()
    await accepted


async def test_a_journal_that_cannot_be_written_refuses_starts_and_loses_nothing() -> None:
    journal = KeptJournal()
    harness = RuntimeHarness(journal=journal)
    running = harness.start(Say("a", seconds=5), Say("b"), spec=None, rollout_id="first")
    await harness.roster.accept([running])
    journal.paused = True
    request = a_wish("same id", rollout_id="second")
    second, _ = harness.wish(request)
    accepted = asyncio.create_task(harness.roster.accept([second]))
    await asyncio.sleep(0)
    journal.fail("the disk is full")
    with pytest.raises(Unavailable) as refused:
        await accepted
    assert (refused.value.reason, refused.value.message) == ("JOURNAL_UNAVAILABLE", "the disk is full")
    with pytest.raises(Unavailable):
        harness.wish(a_wish(rollout_id="third"))
    await asyncio.sleep(100)
    assert running.outcome is None
    journal.paused = False
    journal.fail("")
    assert isinstance((await outcome_of(running)).end, Stop)
    again, found = harness.wish(request)
    assert not found
    assert isinstance((await outcome_of(again)).end, Stop)
    assert second.outcome is None
    assert [rollout for _, rollout in harness.roster.select(Selection(ME))] == [again, running]
    await until(lambda: harness.roster.running == 0)
    assert (harness.roster.queued, harness.roster.active_bytes) == (0, 0)
    await harness.roster.journal.flush()
    stored = await harness.roster.journal.after_crash().load()  # type: ignore[attr-defined]
    assert [each.start.uid for each in stored] == [running.uid, again.uid]


async def test_the_next_process_has_the_finished_rollouts() -> None:
    journal = KeptJournal()
    first = RuntimeHarness(journal=journal)
    rollout, _ = first.wish(a_wish("id", rollout_id="r"))
    outcome = await outcome_of(rollout)
    second = await restored(journal)
    found = second.roster.get(rollout.uid, ME)
    assert found.outcome is not None
    assert shown_outcome(found.outcome) == shown_outcome(outcome)
    assert (found.finished, found.created) == (rollout.finished, rollout.created)
    assert [*found.log.entries] == [*rollout.log.entries]
    assert second.wish(a_wish("id", rollout_id="r")) == (found, True)
    with pytest.raises(Conflict):
        second.wish(a_wish("id", rollout_id="other"))
    assert (await restored(journal, capacity=Capacity(finished_seconds=0.0))).rollouts == []


async def test_what_cannot_be_continued_ends_as_interrupted_with_its_evidence() -> None:
    journal = KeptJournal()
    first = RuntimeHarness(journal=journal)
    rollout = first.start(Say(calls=(call("none"),)), Say(seconds=FOREVER), **ENDS)
    await asyncio.sleep(10)
    second = await restored(journal)
    outcome = await outcome_of(second.rollouts[0])
    assert isinstance(outcome.end, Failure)
    assert (outcome.end.category, outcome.end.failure_class) == (Category.INTERRUPTED, FailureClass.SERVER)
    assert "it was not to be resumed (on_interrupt)" in outcome.end.message
    assert [entry.sequence for entry in second.rollouts[0].log.entries] == list(range(1, rollout.log.last_sequence + 2))
    third = await restored(second.roster.journal)  # type: ignore[arg-type]
    assert third.rollouts[0].outcome is not None
    assert shown_outcome(third.rollouts[0].outcome) == shown_outcome(outcome)


async def test_a_missing_agent_and_another_version_are_named() -> None:
    class Other(Looping):
        name = "other"

    class Newer(Looping):
        version = "2"

    journal = KeptJournal()
    RuntimeHarness(journal=journal).start(Say(seconds=FOREVER))
    await asyncio.sleep(10)
    for agent, text in (
        (Other(), "this server has no agent 'looping' any more"),
        (Newer(), "had version '1' then and has '2' now"),
    ):
        harness = await restored(journal, agent)
        end = (await outcome_of(harness.rollouts[0])).end
        assert isinstance(end, Failure)
        assert text in end.message


async def test_a_delivery_goes_on_with_the_same_bytes_and_the_same_key() -> None:
    journal, receiver = KeptJournal(), Receiver(DOWN)
    first = RuntimeHarness(journal=journal, reporter=receiver)
    rollout, _ = first.wish(owing(first, key="secret"))
    await until(lambda: len(receiver.parcels) == 3)
    crashed = journal.after_crash()
    later = Receiver(DOWN, YES)
    second = await restored(crashed, reporter=later)
    found = second.rollouts[0]
    await until(lambda: not found.owes)
    assert {(each.key, each.body) for each in later.parcels} == {(each.key, each.body) for each in receiver.parcels}
    assert later.credentials == ["secret", "secret"]
    assert later.packed == 0
    assert found.delivery is not None
    assert (found.delivery.state, found.delivery.attempts) == (DeliveryState.ACKNOWLEDGED, 4)
    silent = Receiver(YES)
    third = await restored(second.roster.journal, reporter=silent)  # type: ignore[arg-type]
    await asyncio.sleep(10_000)
    assert silent.parcels == [], "nothing is sent after a stored acknowledgement"
    assert third.rollouts[0].uid == rollout.uid


async def test_an_expiry_is_not_prolonged_by_a_restart() -> None:
    policy = DeliveryRetryPolicy(expiry=100)
    journal = KeptJournal()
    first = RuntimeHarness(journal=journal, reporter=Receiver(DOWN), patience=policy)
    first.wish(owing(first))
    await asyncio.sleep(90)
    second = await restored(journal, reporter=Receiver(DOWN), patience=policy)
    await asyncio.sleep(20)
    delivery = second.rollouts[0].delivery
    assert delivery is not None
    assert delivery.state is DeliveryState.EXPIRED


async def test_a_rollout_whose_acceptance_was_cut_was_never_accepted() -> None:
    journal = KeptJournal()
    RuntimeHarness(journal=journal).start()
    await asyncio.sleep(10)
    half = KeptJournal(journal.committed[:1])
    second = await restored(half)
    assert second.rollouts == []
    await second.roster.journal.flush()
    assert await second.roster.journal.after_crash().load() == []  # type: ignore[attr-defined]


async def test_a_drain_suspends_what_the_next_process_can_continue() -> None:
    journal = KeptJournal()
    first = RuntimeHarness(journal=journal, capacity=Capacity(running=3))
    replays = {
        "completions": Target("grpc://trainer:1", first.start().spec.completions.dialect, replays_turn_keys=True)
    }
    resumed = first.start(Say(seconds=FOREVER), **replays)
    ended = first.start(Say(seconds=FOREVER))
    queued = [first.start(Say("x"), rollout_id=f"queued {number}") for number in range(3)]
    del queued
    first.start(Say(seconds=FOREVER), **replays)
    await asyncio.sleep(1)
    await first.roster.drain(0)
    assert resumed.outcome is None
    assert resumed.is_suspended
    assert ended.outcome is not None
    assert isinstance(ended.outcome.end, Failure)
    assert "its trainer does not replay turn keys" in ended.outcome.end.message
    stored = {each.start.uid: each for each in await journal.after_crash().load()}
    assert not any(isinstance(entry.record, Ended) for entry in stored[resumed.uid].entries)


async def test_a_group_ends_after_the_outcomes_of_its_members_are_stored() -> None:
    journal = KeptJournal()
    harness = GroupHarness(Ranked(), journal=journal)
    group = harness.start_group(2)
    followed = asyncio.create_task(items(group))
    await asyncio.sleep(10)
    *members, result = await followed
    assert [index for _, index, _, _ in members] == [0, 1]  # type: ignore[misc]
    assert isinstance(result, GroupResult)
    await harness.close()


async def test_a_rollout_that_fails_with_the_reward_of_its_group_is_not_started_anew() -> None:
    agent = Ranked()
    agent.failing = ValueError("no ranks")
    harness = GroupHarness(agent, journal=KeptJournal())
    *members, result = await items(harness.start_group(2, refill=1))
    assert len(members) == 2
    assert result == GroupResult(asked=2, usable=0, refilled=0, completed=0, failed=2, cancelled=0, early_stop=False)
    await harness.close()


async def test_a_demand_to_be_resumed_is_refused_where_it_could_never_be_met() -> None:
    class Own(Looping):
        name = "own"

        async def play(self, run: Run) -> None:  # type: ignore[override]
            await run.sample()

    resume = {"on_interrupt": InterruptPolicy.RESUME}
    for harness, text in (
        (RuntimeHarness(), "this server has no journal"),
        (RuntimeHarness(Own(), journal=KeptJournal()), "play of agent 'own' cannot be replayed"),
    ):
        with pytest.raises(NotPossible) as refused:
            harness.start(**resume)  # type: ignore[arg-type]
        assert refused.value.reason == "RESUME_UNSUPPORTED"
        assert text in refused.value.message
    RuntimeHarness(journal=KeptJournal()).start(**resume)  # type: ignore[arg-type]


async def test_the_downtime_between_earlier_processes_is_not_time_of_the_rollout() -> None:
    target = Target("grpc://trainer:1", Dialect.GRPC, replays_turn_keys=True)
    harness = RuntimeHarness(journal=KeptJournal())
    called, hangs = Say(calls=(call("none"),)), Say(seconds=FOREVER)
    harness.start(called, hangs, rollout_id="r", completions=target, limits=Limits(seconds=50))
    for say in hangs, hangs, Say("done"):
        await asyncio.sleep(10)
        crashed = harness.roster.journal.after_crash()  # type: ignore[attr-defined]
        await asyncio.sleep(100)
        harness = await restored(crashed)
        harness.scripts["r"] = Script(say)
    outcome = await outcome_of(harness.rollouts[0])
    assert isinstance(outcome.end, Stop)
    assert outcome.metrics.total_ms < 50_000


async def test_the_segments_of_a_rollout_are_there_before_its_log_is_replayed() -> None:
    journal = KeptJournal()
    first = RuntimeHarness(journal=journal)
    rollout = first.start(Say("", calls=(call("nothing"),), tokens=3), Say("b", seconds=FOREVER))
    await asyncio.sleep(10)
    (segment,) = rollout.segments
    second = RuntimeHarness(journal=journal.after_crash())
    await second.load()
    again = second.roster.get(rollout.uid, ME)
    assert again.machine.ledger.segments == ()
    (found,) = again.segments
    assert (found.id, found.ids(), found.spans) == (segment.id, segment.ids(), segment.spans)
    assert len(found.ids()) > 3

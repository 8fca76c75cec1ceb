"""Agents that own their loop after a restart of the server: their main conversation, their results, and what ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from rollout_server import Run
from rollout_server.core.limits import Limits
from rollout_server.core.outcome import Category, Failure, RewardResult, Stop
from rollout_server.core.record import FINISH, CaptureSettled, Masked, Observed, Resumed
from rollout_server.core.spec import Dialect, Target, TokenizerName
from rollout_server.runtime.capture.continuation import finish
from rollout_server.runtime.capture.endpoint import FinishedWork
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.start_request import Capacity

from tests.runtime.test_capture_restarts import (
    DONE,
    Numbered,
    Once,
    Remote,
    RolloutOver,
    Starting,
    Twice,
    after,
    called,
    first_process,
    records,
    trained,
)
from tests.support.captured_agents import Fields, message_of, model_call, user
from tests.support.group_harness import GroupHarness
from tests.support.journal import KeptJournal
from tests.support.runtime_harness import ME, RuntimeHarness, contents, outcome_of

SYSTEM = {"role": "system", "content": "s"}
MASKED = {"completions": Target("http://t:1", Dialect.HTTP_MASKED), "tokenizer": TokenizerName("toy")}


class Slow(Remote):
    """Its reward takes a while."""

    async def reward(self, run: Run) -> float:
        """Wait."""
        await asyncio.sleep(50)
        return 1.0


async def called_by(rollout: Rollout, agent: str, *messages: Fields) -> Fields:
    return message_of(await rollout.capture.call(model_call(*messages, client_agent=agent)))


@pytest.mark.parametrize("calls_again", [False, True])
async def test_a_sub_agent_with_an_id_stays_one(calls_again: bool) -> None:
    """Its conversation begins like the main one, and it calls first after the restart."""
    journal = KeptJournal()
    _, rollout = first_process(Remote(), journal)
    main = await called(rollout, SYSTEM, user("main"))
    sub = await called_by(rollout, "sub1", SYSTEM, user("sub"))
    await asyncio.sleep(1)
    harness, rollout = await after(journal, Remote())
    if calls_again:
        await called_by(rollout, "sub1", SYSTEM, user("sub"), sub, user("sub more"))
        await called(rollout, SYSTEM, user("main"), main, user("main more"))
    await finish(rollout, FinishedWork())
    outcome = await outcome_of(rollout)
    assert contents(outcome, "user") == ["main", "main more"][: 1 + calls_again]
    await harness.close()


async def test_the_main_conversation_is_known_without_a_completion() -> None:
    journal = KeptJournal()
    main, sub = ({"role": "system", "content": name} for name in ("main", "sub"))
    _, rollout = first_process(Remote(), journal)
    calls = [asyncio.create_task(called(rollout, main, user("m")))]
    await asyncio.sleep(0.5)
    calls.append(asyncio.create_task(called(rollout, sub, user("b"))))
    await asyncio.sleep(0.2)
    for call in calls:
        call.cancel()
    harness, rollout = await after(journal, Remote())
    await called(rollout, sub, user("b"))
    await called(rollout, main, user("m"))
    await finish(rollout, FinishedWork())
    outcome = await outcome_of(rollout)
    assert contents(outcome, "system") == ["main"]
    assert [warning.code for warning in outcome.warnings] == ["resampled", "resampled"]
    await harness.close()


@pytest.mark.parametrize("work", [None, DONE])
async def test_a_limit_that_had_ended_the_calls_stays_the_end(work: FinishedWork | None) -> None:
    """The agent may still finish after the restart, or have finished before it."""
    journal = KeptJournal()
    _, rollout = first_process(Remote(), journal, limits=Limits(turns=1))
    await called(rollout, user("a"))
    with pytest.raises(RolloutOver):
        await called(rollout, user("b"))
    await asyncio.sleep(20)
    for _ in range(2):
        harness, rollout = await after(journal, Remote())
        journal = harness.roster.journal  # type: ignore[assignment]
        await asyncio.sleep(1)
    if work is not None:
        assert await finish(rollout, work) is False
    outcome = await outcome_of(rollout)
    assert outcome.end == Stop("max_turns")
    assert outcome.reward_result.reward == (1.0 if work is None else 0.5)
    assert trained(rollout, outcome) == ["answer 0.1"]
    assert len(records(rollout, CaptureSettled)) == 1
    await harness.close()


@pytest.mark.parametrize(
    ("agent", "spec"), [(Slow(on_restart="end"), {}), (Slow(), MASKED), (Slow(on_restart="end"), MASKED)]
)
async def test_finished_work_is_rewarded_after_a_restart(agent: Remote, spec: Any) -> None:
    """Also where the agent could not have gone on."""
    journal = KeptJournal()
    _, rollout = first_process(agent, journal, **spec)
    await called(rollout, user("a"))
    await finish(rollout, FinishedWork())
    await asyncio.sleep(1)
    _, rollout = await after(journal, agent)
    with pytest.raises(RolloutOver):
        await called(rollout, user("a"))
    outcome = await outcome_of(rollout)
    assert (outcome.end, outcome.reward_result.reward) == (Stop("stop"), 1.0)
    assert trained(rollout, outcome) == ["answer 0.1"]


async def test_finished_work_does_not_start_the_agent_again() -> None:
    began: list[str] = []

    class Booting(Starting):
        name = "booting"

        async def setup(self, run: Run) -> None:
            began.append(run.uid)

        async def reward(self, run: Run) -> float:
            await asyncio.sleep(50)
            return 1.0

    journal = KeptJournal()
    _, rollout = first_process(Booting(), journal)
    await called(rollout, user("a"))
    await finish(rollout, FinishedWork(RewardResult(scores={"a": 1.0})))
    await asyncio.sleep(1)
    _, rollout = await after(journal, Booting())
    outcome = await outcome_of(rollout)
    assert (outcome.end, outcome.reward_result.reward, outcome.reward_result.scores) == (Stop("stop"), 1.0, {"a": 1.0})
    assert len(began) == len([each for each in records(rollout, Observed) if each.what == FINISH]) == 1


async def test_what_was_not_received_does_not_train_in_an_interrupted_rollout() -> None:
    for agent, spec in ((Remote(on_restart="end"), {}), (Remote(), MASKED)):
        journal = KeptJournal()
        _, rollout = first_process(agent, journal, **spec)
        first = await called(rollout, user("a"))
        await called(rollout, user("a"), first, user("b"))
        await asyncio.sleep(1)
        _, rollout = await after(journal, agent)
        outcome = await outcome_of(rollout)
        assert isinstance(outcome.end, Failure)
        assert trained(rollout, outcome) == ["answer 0.1"]


async def test_nor_in_one_that_is_cancelled_before_it_has_a_slot() -> None:
    journal = KeptJournal()
    harness, rollout = first_process(Remote(), journal)
    for each in (rollout, harness.start()):
        await called(each, user("a"))
    await asyncio.sleep(1)
    harness = RuntimeHarness(Remote(), journal=journal.after_crash(), capacity=Capacity(running=1))
    harness.new_script = Numbered
    harness.scripts["r1"] = harness.scripts["r2"] = Numbered()
    await harness.restore()
    found = harness.rollouts = [rollout for _, rollout in harness.roster.select(Selection(ME))]
    assert harness.roster.queued == 1
    harness.roster.cancel(Selection(ME), "x")
    for each in found:
        assert trained(each, await outcome_of(each)) == []
        assert [mask.turn for mask in records(each, Masked)] == [1]
    await harness.close()


async def test_an_agent_without_messages_is_run_anew_if_it_made_no_call() -> None:
    class Noting(Twice):
        name = "noting"

        async def play(self, run: Run) -> None:
            run.note("started", "x")
            await asyncio.sleep(5)
            await super().play(run)

    journal = KeptJournal()
    plain = Target("http://t:1", Dialect.HTTP_PLAIN)
    first_process(Noting(), journal, messages=(), completions=plain)
    await asyncio.sleep(2)
    harness, rollout = await after(journal, Noting())
    outcome = await outcome_of(rollout)
    assert outcome.end == Stop("stop")
    await harness.close()


async def test_the_counts_are_those_of_the_last_attempt() -> None:
    attempts: list[int] = []

    class Idle(Twice):
        name = "idle"

        async def play(self, run: Run) -> None:
            attempts.append(1)
            if len(attempts) == 1:
                await super().play(run)
            else:
                async with run.capture(self.capture):
                    pass

        async def reward(self, run: Run) -> float:
            await asyncio.sleep(50)
            return 1.0

    journal = KeptJournal()
    first_process(Idle(), journal)
    await asyncio.sleep(20)
    harness, rollout = await after(journal, Idle())
    outcome = await outcome_of(rollout)
    assert outcome.capture is not None
    assert (outcome.capture.continued, outcome.messages[-1].role, len(attempts)) == (0, "user", 2)
    await harness.close()


async def test_an_agent_that_has_begun_does_not_begin_again() -> None:
    """Neither `setup` nor `play`, although nothing else is recorded. One that waited for its slot begins."""
    began: list[tuple[object, str]] = []

    class Patient(Once):
        name = "patient"

        async def setup(self, run: Run) -> None:
            began.append((self, run.uid))
            await asyncio.sleep(60)

    journal = KeptJournal()
    harness = RuntimeHarness(Patient(), journal=journal, capacity=Capacity(running=1))
    harness.new_script = Numbered
    rollouts = [harness.start(), harness.start()]
    await asyncio.sleep(30)
    crashed = journal.after_crash()
    later = Patient()
    harness = RuntimeHarness(later, journal=crashed)
    harness.scripts["r1"] = harness.scripts["r2"] = Numbered()
    await harness.restore()
    harness.rollouts = [rollout for _, rollout in harness.roster.select(Selection(ME))]
    restored = {rollout.uid: rollout for rollout in harness.rollouts}
    first, second = [(await outcome_of(restored[rollout.uid])).end for rollout in rollouts]
    assert isinstance(first, Failure)
    assert first.category is Category.INTERRUPTED
    assert second == Stop("stop")
    assert [uid for agent, uid in began if agent is later] == [rollouts[1].uid]
    await harness.close()


async def test_the_time_of_a_rollout_begins_with_its_agent() -> None:
    """Its first call comes later."""
    journal = KeptJournal()
    _, rollout = first_process(Remote(), journal, limits=Limits(seconds=400))
    await asyncio.sleep(300)
    await called(rollout, user("a"))
    await asyncio.sleep(1)
    harness, rollout = await after(journal, Remote())
    assert rollout.earlier_seconds == 301.0
    outcome = await outcome_of(rollout)
    assert isinstance(outcome.end, Failure)
    assert outcome.end.category is Category.TIMEOUT
    assert outcome.metrics.total_ms == 400_000.0
    assert outcome.metrics.queued_ms < 1000
    await harness.close()


@pytest.mark.parametrize(("on_restart", "cleaned"), [("continue", 0), ("end", 1)])
async def test_a_drain_leaves_an_agent_alone_that_goes_on(on_restart: Any, cleaned: int) -> None:
    calls: list[str] = []

    class Cleaning(Remote):
        name = "cleaning"

        async def cleanup(self, run: Run) -> None:
            calls.append(run.uid)

    journal = KeptJournal()
    harness, rollout = first_process(Cleaning(on_restart=on_restart), journal)
    await called(rollout, user("a"))
    await harness.roster.drain(0)
    assert len(calls) == cleaned
    if rollout.is_suspended:
        harness, rollout = await after(journal, Cleaning(on_restart=on_restart))
        await asyncio.sleep(1)
        await finish(rollout, DONE)
        await outcome_of(rollout)
        assert [each.times for each in records(rollout, Resumed)] == [1]
        assert len(calls) == 1
        await harness.close()


async def test_a_member_that_waits_for_its_group_keeps_its_end() -> None:
    class Ranked(Remote):
        name = "ranked"

        async def reward_group(self, runs: Sequence[Run]) -> list[float]:
            return [7.0 for _ in runs]

    harness = GroupHarness(Ranked(), journal=KeptJournal())
    harness.new_script = Numbered
    first, second = harness.start_group(2, limits=Limits(turns=1)).members
    await called(first, user("a"))
    with pytest.raises(RolloutOver):
        await called(first, user("b"))
    await finish(first, DONE)
    await asyncio.sleep(1)
    uids = [first.uid, second.uid]
    harness = await harness.next_process(Ranked())
    await asyncio.sleep(1)
    rollouts = {rollout.uid: rollout for _, rollout in harness.roster.select(Selection(ME))}
    await finish(rollouts[uids[1]], DONE)
    outcomes = [await outcome_of(rollouts[uid]) for uid in uids]
    assert [outcome.end for outcome in outcomes] == [Stop("max_turns"), Stop("stop")]
    assert [outcome.reward_result.reward for outcome in outcomes] == [7.0, 7.0]
    await harness.close()

"""A durable journal at the edges: refused starts, the end of a process, and what a restart counts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rollout_server.core.error import Busy, Unavailable
from rollout_server.core.outcome import Cancellation, Category, Failure, Stop
from rollout_server.core.record import Accepted, Answered, Asked, Ended, Note
from rollout_server.core.spec import Dialect, InterruptPolicy, Target
from rollout_server.runtime.errors import RolloutEnded
from rollout_server.runtime.journal import EntriesAppended, JournalUnusable
from rollout_server.runtime.ports import CompletionRequest
from rollout_server.runtime.registry.dependencies import DeliveryRetryPolicy
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import Rollout, RolloutState
from rollout_server.runtime.run.run import Run
from rollout_server.runtime.start_request import Capacity, Quota, StartRequest

from tests.runtime.outcome_receivers import DOWN, RECEIVER, Receiver
from tests.support.journal import KeptJournal
from tests.support.runtime_harness import FOREVER, ME, Looping, RuntimeHarness, Say, Script, a_spec, a_wish, call

REPLAYS = Target("grpc://trainer:50051", Dialect.GRPC, replays_turn_keys=True)
HANGS = Say("a", seconds=FOREVER)


class Own(Looping):
    """An agent that cannot be replayed."""

    name = "own"

    async def play(self, run: Run) -> None:
        await super().play(run)


def next_process(journal: KeptJournal, *agents: Looping, **settings: object) -> RuntimeHarness:
    """The next process after a crash, before it restores. Its trainer never answers."""
    harness = RuntimeHarness(*agents, journal=journal.after_crash(), **settings)  # type: ignore[arg-type]
    harness.scripts = {f"r{number}": Script(HANGS) for number in range(1, 20)}
    return harness


def known(harness: RuntimeHarness) -> Sequence[Rollout]:
    """The rollouts of a harness, the oldest first."""
    return [rollout for _, rollout in harness.roster.select(Selection(ME))][::-1]


def failure_of(rollout: Rollout) -> Failure:
    """The failure with which a rollout has ended."""
    assert rollout.outcome is not None
    assert isinstance(rollout.outcome.end, Failure)
    return rollout.outcome.end


async def test_a_drain_waits_for_the_commit_of_the_ends_that_it_causes() -> None:
    journal, receiver = KeptJournal(), Receiver(seconds=2)
    harness = RuntimeHarness(journal=journal, reporter=receiver)
    rollout = harness.start(HANGS, outcome=RECEIVER, on_interrupt=InterruptPolicy.FAIL)
    await asyncio.sleep(1)
    journal.paused = True
    asyncio.get_running_loop().call_later(3, journal.commit)
    asyncio.get_running_loop().call_later(3, setattr, journal, "paused", False)
    await harness.roster.drain(0)
    assert failure_of(rollout).category is Category.INTERRUPTED
    assert len(receiver.parcels) == 1
    assert not rollout.owes


async def test_a_cancel_that_was_answered_holds_after_a_crash() -> None:
    journal = KeptJournal()
    harness = RuntimeHarness(journal=journal)
    running, other = harness.start(HANGS), harness.start(HANGS, completions=REPLAYS)
    await asyncio.sleep(1)
    journal.paused = True  # so the end of the rollout is not stored
    assert harness.roster.cancel(Selection(ME, uids=(running.uid,)), "enough") == [running.uid]
    journal.commit()
    second = next_process(journal)
    await second.restore()
    restored, continued = known(second)
    assert (restored.uid, continued.uid) == (running.uid, other.uid)
    await second.roster.journal.flush()
    assert restored.outcome is not None
    assert restored.outcome.end == Cancellation("enough")
    assert continued.outcome is None


async def slow_restart() -> tuple[RuntimeHarness, Rollout]:
    """Restart with a rollout whose clients may be gone for 10 s. The ports stay closed for longer, while the journal is read."""
    journal = KeptJournal()
    RuntimeHarness(journal=journal).start(HANGS, completions=REPLAYS, cancel_after_detach=10.0)
    await asyncio.sleep(1)
    second = next_process(journal)
    await second.load()
    await asyncio.sleep(100)
    (rollout,) = known(second)
    return second, rollout


async def test_the_time_without_a_client_begins_once_clients_can_attach_again() -> None:
    second, rollout = await slow_restart()
    with rollout.attached():  # between the opening of the ports and `resume`
        await asyncio.sleep(1)
    await asyncio.sleep(1)
    second.roster.resume()
    await asyncio.sleep(5)
    with rollout.attached():
        await asyncio.sleep(100)
        assert rollout.state is RolloutState.RUNNING
    await asyncio.sleep(11)
    assert rollout.outcome is not None
    assert rollout.outcome.end == Cancellation("detached")


async def test_a_rollout_that_no_client_comes_back_to_is_cancelled_after_its_grace() -> None:
    second, rollout = await slow_restart()
    second.roster.resume()
    await asyncio.sleep(9)
    assert rollout.outcome is None
    await asyncio.sleep(2)
    assert rollout.outcome is not None
    assert rollout.outcome.end == Cancellation("detached")


async def test_a_refused_start_is_dropped_before_its_agent_has_cleaned_up() -> None:
    """Otherwise a crash meanwhile leaves two rollouts under one request id."""

    class Tidy(Looping):
        cleanup_seconds = 100.0

        async def cleanup(self, run: Run) -> None:
            await asyncio.sleep(50)

    journal = KeptJournal()
    harness = RuntimeHarness(Tidy(), journal=journal)
    journal.paused = True
    refused, _ = harness.wish(a_wish("id"))
    accepted = asyncio.create_task(harness.roster.accept([refused]))
    await asyncio.sleep(1)
    journal.fail("the disk is full")
    with pytest.raises(Unavailable):
        await accepted
    refused.record(Note(0, "late", "what an agent still does"))  # which nobody stores
    journal.paused = False
    journal.fail("")
    again, found = harness.wish(a_wish("id"))
    assert not found
    await harness.roster.accept([again])
    assert refused.running
    assert [each.start.uid for each in await journal.after_crash().load()] == [again.uid]
    await asyncio.sleep(100)
    assert (harness.roster.running, harness.roster.active_bytes) == (0, 0)


@pytest.mark.parametrize("before", ["drain", "detached"])
async def test_a_cancel_holds_whatever_end_was_requested_before(before: str) -> None:
    """The rollout is suspended, or its agent still cleans up, so the end that was requested first is not stored."""

    class Tidy(Looping):
        replayable = True
        cleanup_seconds = 100.0

        async def cleanup(self, run: Run) -> None:
            await asyncio.sleep(20)

    journal = KeptJournal()
    harness = RuntimeHarness(Looping() if before == "drain" else Tidy(), journal=journal)
    rollout = harness.start(HANGS, completions=REPLAYS, cancel_after_detach=None if before == "drain" else 2.0)
    await asyncio.sleep(1)
    if before == "drain":
        await harness.roster.drain(0)
    else:
        await asyncio.sleep(5)
        assert rollout.ending.requested.result() == Cancellation("detached")
    assert harness.roster.cancel(Selection(ME), "enough") == [rollout.uid]
    await harness.roster.accept(())
    second = next_process(journal)
    await second.restore()
    await second.roster.journal.flush()
    (restored,) = known(second)
    assert restored.outcome is not None
    assert (restored.outcome.end, second.opened) == (Cancellation("enough"), [])


@pytest.mark.parametrize("resumable", [True, False])
async def test_a_cancel_before_rollouts_continue_counts(resumable: bool) -> None:
    journal = KeptJournal()
    harness = RuntimeHarness(journal=journal)
    harness.start(
        Say(calls=(call("none"),), seconds=1), HANGS, completions=replace(REPLAYS, replays_turn_keys=resumable)
    )
    await asyncio.sleep(2)
    second = next_process(journal)
    await second.load()
    (restored,) = known(second)
    assert second.roster.cancel(Selection(ME), "enough") == [restored.uid]
    await asyncio.sleep(0)
    second.roster.resume()
    await second.roster.journal.flush()
    assert restored.outcome is not None
    assert (restored.outcome.end, second.opened) == (Cancellation("enough"), [])
    assert restored.outcome.metrics.total_ms > 0


async def test_a_drain_ends_what_its_stream_could_not_start_again() -> None:
    harness = RuntimeHarness(journal=KeptJournal())
    stream = Target("", Dialect.STREAM)
    unnamed = harness.start(HANGS, completions=stream)
    named, _ = harness.wish(StartRequest(a_spec(completions=stream, rollout_id="named"), "me", "key"))
    harness.scripts["named"] = Script(HANGS)
    await asyncio.sleep(1)
    await harness.roster.drain(0)
    assert "has no request id" in failure_of(unnamed).message
    assert (named.outcome, named.is_suspended) == (None, True)


async def test_a_drain_ends_although_the_journal_cannot_be_written() -> None:
    journal = KeptJournal()
    harness = RuntimeHarness(journal=journal)
    rollout = harness.start(HANGS, on_interrupt=InterruptPolicy.FAIL)
    await asyncio.sleep(1)
    journal.paused = True
    async with asyncio.timeout(60):
        await harness.roster.drain(0)
    assert rollout.outcome is None


async def refused(journal: KeptJournal, accepted: asyncio.Task[None]) -> None:
    """Let the disk be full while a start waits for its commit."""
    await asyncio.sleep(0)
    journal.fail("the disk is full")
    with pytest.raises(Unavailable):
        await accepted


async def test_a_refused_rollout_whose_end_was_recorded_is_forgotten() -> None:
    journal, receiver = KeptJournal(), Receiver()
    journal.paused = True
    harness = RuntimeHarness(journal=journal, reporter=receiver, capacity=Capacity(finished=0))
    rollout = harness.start(HANGS, outcome=RECEIVER)
    accepted = asyncio.create_task(harness.roster.accept([rollout]))
    await asyncio.sleep(1)
    rollout.ending.request(Cancellation("by a caller"))
    await asyncio.sleep(1)
    assert rollout.machine.outcome is not None
    await refused(journal, accepted)
    journal.paused = False
    journal.fail("")
    await asyncio.sleep(100)
    assert (receiver.parcels, known(harness), harness.roster.active_bytes) == ([], [], 0)
    assert (harness.roster.running, harness.roster.owed, harness.roster.totals.finished) == (0, 0, 0)


async def test_who_watches_a_refused_rollout_gets_the_refusal() -> None:
    journal = KeptJournal()
    journal.paused = True
    harness = RuntimeHarness(journal=journal)
    rollout = harness.start(HANGS)
    accepted = asyncio.create_task(harness.roster.accept([rollout]))

    async def watch() -> None:
        async for _ in rollout.log.follow(0):
            pass

    watching = asyncio.create_task(watch())
    waiting = asyncio.create_task(rollout.log.final_entry())
    await refused(journal, accepted)
    for reader in (watching, waiting, asyncio.create_task(watch()), asyncio.create_task(rollout.log.final_entry())):
        with pytest.raises(Unavailable, match="the disk is full"):
            await reader  # type: ignore[misc]


async def test_a_restart_does_not_charge_the_starts_per_minute_again() -> None:
    journal = KeptJournal()
    first = RuntimeHarness(journal=journal)
    for _ in range(6):
        first.start(HANGS, completions=REPLAYS)
    await asyncio.sleep(1)
    capacity = Capacity(per_caller=Quota(starts_per_minute=2), shared=True)
    second = next_process(journal, capacity=capacity)
    await second.restore()
    for name in ("r7", "r8"):
        second.wish(StartRequest(a_spec(rollout_id=name), "me"))
    with pytest.raises(Busy, match="may start 2 rollouts a minute"):
        second.wish(StartRequest(a_spec(rollout_id="r9"), "me"))


async def test_a_log_that_contradicts_itself_is_named_without_its_contents() -> None:
    journal = KeptJournal()
    first = RuntimeHarness(journal=journal)
    rollout = first.start(Say("the secret of the model"))
    await asyncio.sleep(1)
    entries = [entry for entry in rollout.log.entries if not isinstance(entry.record, Asked)]
    entries = [replace(entry, sequence=number) for number, entry in enumerate(entries, start=1)]
    others = [change for change in journal.committed if not isinstance(change, EntriesAppended)]
    damaged = KeptJournal([others[0], EntriesAppended(rollout.uid, entries), *others[1:]])
    with pytest.raises(JournalUnusable, match=f"rollout {rollout.uid} cannot be rebuilt") as caught:
        await RuntimeHarness(journal=damaged).load()
    assert "secret" not in str(caught.value)
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)


async def test_nothing_runs_and_nothing_is_sent_before_the_server_is_open() -> None:
    journal, receiver = KeptJournal(), Receiver()
    first = RuntimeHarness(journal=journal, reporter=Receiver(DOWN))
    first.start(Say("done"), outcome=RECEIVER)
    first.start(HANGS, completions=REPLAYS)
    first.start(HANGS, on_interrupt=InterruptPolicy.FAIL, outcome=RECEIVER)
    await asyncio.sleep(10)
    second = next_process(journal, reporter=receiver)
    await second.load()
    await asyncio.sleep(10)
    assert (second.opened, receiver.parcels, second.roster.running, second.roster.queued) == ([], [], 0, 1)
    done, running, interrupted = known(second)
    assert interrupted.outcome is None
    second.roster.acknowledge(done.uid, ME)
    second.roster.resume()
    await asyncio.sleep(10)
    assert (second.opened, running.running) == (["r2"], True)
    assert failure_of(interrupted).category is Category.INTERRUPTED
    assert [parcel.key for parcel in receiver.parcels] == [f"{interrupted.uid}/outcome"]


async def test_a_start_that_fails_before_the_server_is_open_changes_nothing() -> None:
    journal = KeptJournal()
    first = RuntimeHarness(journal=journal)
    first.start(HANGS, completions=REPLAYS)
    first.start(HANGS, on_interrupt=InterruptPolicy.FAIL)
    await asyncio.sleep(10)
    second = next_process(journal)
    before = [*second.roster.journal.committed]  # type: ignore[attr-defined]
    await second.load()
    await second.roster.drain(0)
    assert second.roster.journal.committed == before  # type: ignore[attr-defined]


async def test_after_a_restart_the_rollout_that_finished_first_is_dropped_first() -> None:
    journal = KeptJournal()
    first = RuntimeHarness(journal=journal)
    slow, _ = first.start(Say("a", seconds=30)), first.start(Say("b"))
    await asyncio.sleep(60)
    second = next_process(journal, capacity=Capacity(finished=1))
    await second.restore()
    assert [rollout.uid for rollout in known(second)] == [slow.uid]


@pytest.mark.parametrize("crash", [True, False])
async def test_a_rollout_that_never_ran_is_queued_again_whatever_its_agent(crash: bool) -> None:
    journal = KeptJournal()
    first = RuntimeHarness(Own(), journal=journal, capacity=Capacity(running=1, queued=5))
    first.start(HANGS)
    first.start(HANGS)
    first.start(HANGS, on_interrupt=InterruptPolicy.FAIL)
    await asyncio.sleep(10)
    if not crash:
        await first.roster.drain(0)
    second = next_process(journal, Own())
    second.scripts["r2"] = Script(Say("done"))
    await second.restore()
    await asyncio.sleep(10)
    ran, waited, forbidden = known(second)
    assert "cannot be replayed" in failure_of(ran).message
    assert waited.outcome is not None
    assert isinstance(waited.outcome.end, Stop)
    assert "on_interrupt" in failure_of(forbidden).message


async def test_the_time_of_an_end_is_published_with_it() -> None:
    journal = KeptJournal()
    rollout = RuntimeHarness(journal=journal).start(Say("a", seconds=5))
    await asyncio.sleep(1)
    journal.paused = True
    rollout.ending.request(Cancellation("now"))
    await asyncio.sleep(5)
    assert rollout.machine.outcome is not None
    assert rollout.finished is None
    journal.commit()
    assert rollout.finished is not None


async def test_an_interrupted_rollout_has_the_times_of_its_earlier_process() -> None:
    journal = KeptJournal()
    first = RuntimeHarness(journal=journal, capacity=Capacity(running=1, queued=5))
    first.start(Say(calls=(call("none"),), seconds=20), HANGS, on_interrupt=InterruptPolicy.FAIL)
    first.start(HANGS, on_interrupt=InterruptPolicy.FAIL)
    await asyncio.sleep(50)
    second = next_process(journal)
    await second.restore()
    await asyncio.sleep(1)
    ran, waited = (rollout.outcome.metrics for rollout in known(second) if rollout.outcome is not None)
    assert (ran.total_ms, ran.queued_ms) == (pytest.approx(20_000, abs=100), pytest.approx(0, abs=100))
    assert (waited.total_ms, waited.queued_ms) == (0, pytest.approx(50_000, abs=100))


async def test_the_retries_of_a_delivery_do_not_begin_anew_with_a_restart() -> None:
    journal, policy = KeptJournal(), DeliveryRetryPolicy(first=10, most=10, retries=2)
    first = RuntimeHarness(journal=journal, reporter=Receiver(DOWN), patience=policy)
    first.start(Say("a"), outcome=RECEIVER)
    await asyncio.sleep(15)  # two attempts
    receiver = Receiver(DOWN)
    second = next_process(journal, reporter=receiver, patience=policy)
    await second.restore()
    await asyncio.sleep(100)
    (rollout,) = known(second)
    assert len(receiver.parcels) == 1
    assert rollout.undelivered
    assert second.roster.redeliver(Selection(ME)) == [rollout.uid]
    await asyncio.sleep(100)
    assert len(receiver.parcels) == 4
    assert rollout.delivery is not None
    assert rollout.delivery.attempts == 6


async def test_a_suspended_agent_records_nothing_more() -> None:
    class Waiting(Looping):
        name = "waiting"
        replayable = True
        run: Run

        async def play(self, run: Run) -> None:
            self.run = run
            await run.sample()
            await asyncio.Event().wait()

    agent = Waiting()
    rollout = RuntimeHarness(agent, journal=KeptJournal()).start(Say("a"), completions=REPLAYS)
    await asyncio.sleep(1)
    before = len(rollout.log.entries)
    rollout.suspend()
    with pytest.raises(RolloutEnded):  # before the driver has cancelled the agent
        await agent.run.append({"role": "user", "content": "more"})
    assert len(rollout.log.entries) == before
    await asyncio.sleep(1)
    assert not rollout.running


async def test_a_request_that_was_refused_starts_anew() -> None:
    journal = KeptJournal()
    journal.paused = True
    harness = RuntimeHarness(journal=journal)
    rollout, _ = harness.wish(a_wish("id"))
    await refused(journal, asyncio.create_task(harness.roster.accept([rollout])))
    journal.paused = False
    journal.fail("")
    again, found = harness.wish(a_wish("id"))
    assert (found, again is rollout) == (False, False)


@pytest.mark.parametrize("continues", [False, True])
async def test_what_arrives_once_a_drain_has_decided_is_not_recorded(
    continues: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With its completion, a rollout that ends because its turn was being generated would be one that could have continued."""
    arrived = asyncio.Event()

    class Arriving(Script):
        async def sample(self, ask: CompletionRequest) -> Answered:
            await arrived.wait()
            return Say("a").answer(ask.asked.turn)

    harness = RuntimeHarness(journal=KeptJournal())
    harness.new_script = Arriving
    rollout = harness.start(completions=replace(REPLAYS, replays_turn_keys=continues))
    await asyncio.sleep(1)
    drain = asyncio.create_task(harness.roster.drain(0))
    asyncio.get_running_loop().call_soon(arrived.set)  # right after the decision, and before the driver hears of it
    await drain
    ended = [] if continues else [Ended]
    assert [type(entry.record) for entry in rollout.log.entries] == [Accepted, Asked, *ended]
    if not continues:
        assert "turn 1 was being generated" in failure_of(rollout).message
    assert [line for line in caplog.records if line.levelno >= logging.ERROR] == []

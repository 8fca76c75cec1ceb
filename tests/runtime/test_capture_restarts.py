"""Agents that own their loop after a restart of the server: no token trains twice, or without that the agent has received it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from rollout_server import Agent, ExternalAgent, Run
from rollout_server.agent.own_loop import OwnLoopAgent
from rollout_server.core.error import AlreadyFinished, NotPossible, RolloutOver
from rollout_server.core.ledger import SegmentKind
from rollout_server.core.limits import Limits
from rollout_server.core.outcome import Category, Failure, FailureClass, Outcome, RewardResult, Stop
from rollout_server.core.record import Answered, Asked, Forked, GivenUp, Masked, Resumed
from rollout_server.core.spec import Dialect, InterruptPolicy, Target, TokenizerName
from rollout_server.runtime.capture.continuation import EARLIER_ATTEMPT, UNSEEN, finish
from rollout_server.runtime.capture.endpoint import FinishedWork
from rollout_server.runtime.ports import CompletionRequest
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import Rollout

from tests.support.captured_agents import Fields, message_of, model_call, user
from tests.support.journal import KeptJournal
from tests.support.runtime_harness import FOREVER, ME, RuntimeHarness, Say, Script, contents, outcome_of

DONE = FinishedWork(RewardResult(0.5, {"tests": 1.0}))
FAILED = FinishedWork(RewardResult(extra_json='{"a":1}'), Failure(Category.TOOL, "broken", source=FailureClass.TOOL))


class Crashing(KeptJournal):
    """Says when it has committed for the nth time."""

    def __init__(self, crash_at: int) -> None:
        super().__init__()
        self.crash_at = crash_at
        self.crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def commit(self) -> None:
        """Commit."""
        super().commit()
        if self.commits == self.crash_at and not self.crashed.done():
            self.crashed.set_result(None)


class Numbered(Script):
    """Each completion has another text, also in another process."""

    process = 0

    async def sample(self, ask: CompletionRequest) -> Answered:
        self.says = (Say(f"answer {self.process}.{ask.asked.turn}", seconds=1.0),)
        return await super().sample(ask)


class Remote(ExternalAgent):
    """Runs elsewhere."""

    name = "remote"

    async def reward(self, run: Run) -> float:
        run.note("judged", str([message.get("content") for message in run.messages]))
        return 1.0


class Twice(OwnLoopAgent):
    """Calls its model twice; is run anew."""

    name = "twice"
    on_restart = "again"

    async def play(self, run: Run) -> None:
        history = [user("Do it.")]
        async with run.capture(self.capture) as capture:
            for _ in range(2):
                history += [message_of(await capture.call(model_call(*history))), user("Go on.")]


class Once(Twice):
    """Calls its model twice; ends with the server."""

    name = "once"
    on_restart = "end"


class Client:
    """The agent's own process: it survives the server. It has a main conversation, and one of a sub-agent."""

    def __init__(self) -> None:
        self.histories: dict[str, list[Fields]] = {"main": [user("Main?")], "sub": [user("Sub?")]}
        self.seen: list[str] = []

    async def work(self, rollout: Rollout) -> None:
        """Work on from where it is, to the end."""
        await asyncio.gather(self._converse(rollout, "main", 3), self._converse(rollout, "sub", 2))
        await finish(rollout, FinishedWork())

    async def _converse(self, rollout: Rollout, name: str, turns: int) -> None:
        history = self.histories[name]
        system = {"role": "system", "content": name}
        while len(history) < 2 * turns:
            completed = await rollout.capture.call(model_call(system, *history))
            message = message_of(completed)
            self.seen.append(str(message["content"]))
            history += [message, user("Go on.")]
            await rollout.capture.confirm(completed.id)


async def after(journal: KeptJournal, agent: Any, process: int = 2) -> tuple[RuntimeHarness, Rollout]:
    """The next process after a crash, and its only rollout."""
    harness = RuntimeHarness(agent, journal=journal.after_crash())
    script = type("Later", (Numbered,), {"process": process})
    harness.new_script = script
    harness.scripts["r1"] = script()
    await harness.restore()
    (rollout,) = harness.rollouts = [rollout for _, rollout in harness.roster.select(Selection(ME))]
    return harness, rollout


def first_process(agent: Any, journal: KeptJournal, **spec: Any) -> tuple[RuntimeHarness, Rollout]:
    """A process that has just started a rollout."""
    harness = RuntimeHarness(agent, journal=journal)
    harness.new_script = Numbered
    return harness, harness.start(**spec)


def records(rollout: Rollout, kind: type[Any]) -> list[Any]:
    return [entry.record for entry in rollout.log.entries if isinstance(entry.record, kind)]


def trained(rollout: Rollout, outcome: Outcome) -> list[str]:
    """The texts of the completions that train, once for each sample in which they do."""
    texts = {each.turn: each.message.fields()["content"] for each in records(rollout, Answered)}
    return [str(texts[span.turn]) for segment in outcome.segments for span in segment.spans if span.trains]


async def called(rollout: Rollout, *messages: Fields) -> Fields:
    return message_of(await rollout.capture.call(model_call(*messages)))


@pytest.mark.parametrize("crash_at", range(1, 22))
async def test_what_trains_was_received_and_trains_once(crash_at: int) -> None:
    """A crash after each commit of an agent elsewhere, which then goes on, and repeats the calls that were under way."""
    journal, client = Crashing(crash_at), Client()
    _, rollout = first_process(Remote(), journal)
    working = asyncio.create_task(client.work(rollout))
    await asyncio.wait({working, journal.crashed}, return_when=asyncio.FIRST_COMPLETED)
    ended = working.done()
    next_journal = journal.after_crash()
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    harness, rollout = await after(next_journal, Remote())
    if not ended:
        await client.work(rollout)
    outcome = await outcome_of(rollout)
    assert outcome.end == Stop("stop")
    texts = trained(rollout, outcome)
    assert max(Counter(texts).values()) == 1
    assert set(texts) <= set(client.seen)
    assert len(texts) >= 5 - 2  # of each conversation at most its last completion before the crash does not train
    assert contents(outcome, "system") == ["main"]
    assert contents(outcome, "assistant")[-1] == client.histories["main"][-2]["content"]
    assert all(mask.reason in (UNSEEN, "abandoned") for mask in records(rollout, Masked))
    await harness.close()


async def test_two_crashes_and_a_call_that_is_repeated() -> None:
    journal, client = KeptJournal(), Client()
    _, rollout = first_process(Remote(), journal)
    for process in (2, 3):
        working = asyncio.create_task(client.work(rollout))
        await asyncio.sleep(1.5)
        working.cancel()
        harness, rollout = await after(journal, Remote(), process)
        journal = harness.roster.journal  # type: ignore[assignment]
        await asyncio.sleep(0.1)
    assert len(records(rollout, GivenUp)) == 3  # the sub-agent had finished before the second crash
    await client.work(rollout)
    outcome = await outcome_of(rollout)
    texts = trained(rollout, outcome)
    assert sorted(texts) == sorted(set(texts) & set(client.seen))
    assert [each.times for each in records(rollout, Resumed)] == [1, 2]
    assert {fork.origin.kind for fork in records(rollout, Forked)} <= {
        SegmentKind.MAIN,
        SegmentKind.SUBAGENT,
        SegmentKind.DRIFT,
    }


async def test_finished_work_outlives_the_server_and_can_be_repeated() -> None:
    for work in (DONE, FAILED):
        journal = Crashing(10**9)
        _, rollout = first_process(Remote(), journal)
        await called(rollout, user("a"))
        finishing = asyncio.create_task(finish(rollout, work))
        await asyncio.sleep(0)
        journal.commit()
        crashed = journal.after_crash()
        assert await finishing is False
        harness, rollout = await after(crashed, Remote())
        assert await finish(rollout, work) is True
        outcome = await outcome_of(rollout)
        assert outcome.end == (work.failure or Stop("stop")) or isinstance(outcome.end, Failure)
        assert outcome.reward_result.reward == (None if work.failure else 0.5)
        with pytest.raises(AlreadyFinished):
            await finish(rollout, FinishedWork(RewardResult(7.0)))
        await asyncio.sleep(1)
        _, ended = await after(harness.roster.journal, Remote())  # type: ignore[arg-type]
        assert ended.outcome is not None
        assert await finish(ended, work) is True
        with pytest.raises(RolloutOver):
            await called(ended, user("a"))


async def test_calls_that_were_settled_are_not_settled_again() -> None:
    """A crash while the reward is computed."""
    judged: asyncio.Event = asyncio.Event()

    class Slow(Remote):
        async def reward(self, run: Run) -> float:
            judged.set()
            await asyncio.sleep(10)
            return await super().reward(run)

    journal = KeptJournal()
    _, rollout = first_process(Slow(), journal)
    first = await called(rollout, user("a"))
    await called(rollout, user("a"), first, user("b"))
    await finish(rollout, FinishedWork())
    await judged.wait()
    await asyncio.sleep(1)
    harness, rollout = await after(journal, Slow())
    await asyncio.sleep(1)
    harness, rollout = await after(harness.roster.journal, Slow())  # type: ignore[arg-type]
    outcome = await outcome_of(rollout)
    assert outcome.reward_result.reward == 1.0
    assert len(trained(rollout, outcome)) == 2
    assert outcome.capture is not None
    assert outcome.capture.continued == 1
    await harness.close()


async def test_a_compaction_before_the_crash_stays_the_main_conversation() -> None:
    journal = KeptJournal()
    _, rollout = first_process(Remote(), journal)
    system = {"role": "system", "content": "s"}
    await called(rollout, system, user("a"))
    await called(rollout, system, user("summary"))
    await asyncio.sleep(1)
    harness, rollout = await after(journal, Remote())
    await finish(rollout, FinishedWork())
    outcome = await outcome_of(rollout)
    assert contents(outcome, "user") == ["summary"]
    await harness.close()


async def test_the_main_conversation_is_found_again_whoever_calls_first() -> None:
    main, sub = ({"role": "system", "content": name} for name in ("main", "sub"))
    for order in (("sub",), ("sub", "main"), ("main", "sub")):
        journal = KeptJournal()
        _, rollout = first_process(Remote(), journal)
        answers = {"main": await called(rollout, main, user("a")), "sub": await called(rollout, sub, user("b"))}
        histories = {"main": [main, user("a"), answers["main"]], "sub": [sub, user("b"), answers["sub"]]}
        await asyncio.sleep(1)
        harness, rollout = await after(journal, Remote())
        for name in order:
            await called(rollout, *histories[name], user("Go on."))
        await finish(rollout, FinishedWork())
        outcome = await outcome_of(rollout)
        assert contents(outcome, "system") == ["main"]
        assert len(contents(outcome, "assistant")) == 1 + ("main" in order)
        kinds = [fork.origin.kind for fork in records(rollout, Forked)][2:]
        assert kinds == [{"main": SegmentKind.DRIFT, "sub": SegmentKind.SUBAGENT}[name] for name in order]
        await harness.close()


async def test_an_agent_that_does_not_come_back_ends_its_rollout() -> None:
    journal = KeptJournal()
    _, rollout = first_process(Remote(), journal)
    await called(rollout, user("a"))
    await asyncio.sleep(1)
    harness, rollout = await after(journal, Remote())
    outcome = await outcome_of(rollout)
    assert isinstance(outcome.end, Failure)
    assert "neither called its model or a tool nor finished" in outcome.end.message
    await harness.close()


async def test_limits_count_on() -> None:
    journal = KeptJournal()
    _, rollout = first_process(Remote(), journal, limits=Limits(turns=2))
    await called(rollout, user("a"))
    await asyncio.sleep(1)
    harness, rollout = await after(journal, Remote())
    await called(rollout, user("b"))
    with pytest.raises(RolloutOver):
        await called(rollout, user("c"))
    assert await finish(rollout, DONE) is False
    outcome = await outcome_of(rollout)
    assert outcome.end == Stop("max_turns")
    assert outcome.reward_result.reward == 0.5
    await harness.close()


@pytest.mark.parametrize("seconds", [0.5, 1.5, 1.0])
async def test_an_agent_that_died_with_the_server_is_run_anew(seconds: float) -> None:
    journal = KeptJournal()
    _, rollout = first_process(Twice(), journal, limits=Limits(turns=4))
    await asyncio.sleep(seconds)
    harness, rollout = await after(journal, Twice())
    outcome = await outcome_of(rollout)
    assert outcome.end == Stop("stop")
    assert outcome.metrics.turns == len(records(rollout, Answered))
    assert len(records(rollout, GivenUp)) == len(records(rollout, Asked)) - len(records(rollout, Answered))
    assert all(text.startswith("answer 2.") for text in trained(rollout, outcome))
    assert len(trained(rollout, outcome)) == 2
    assert {mask.reason for mask in records(rollout, Masked)} <= {EARLIER_ATTEMPT}
    assert contents(outcome, "user") == ["Do it.", "Go on."]
    assert [segment.origin.kind for segment in outcome.segments][-1] is SegmentKind.MAIN
    assert [each.times for each in records(rollout, Resumed)] == [1]
    await harness.close()


async def test_an_agent_that_died_with_the_server_ends_without_the_setting() -> None:
    journal = KeptJournal()
    _, rollout = first_process(Once(), journal)
    await asyncio.sleep(1.5)
    _, rollout = await after(journal, Once())
    outcome = await outcome_of(rollout)
    assert isinstance(outcome.end, Failure)
    assert outcome.end.category is Category.INTERRUPTED
    assert "on_restart" in outcome.end.message
    assert trained(rollout, outcome) == ["answer 0.1"]


async def test_a_trainer_of_one_conversation_cannot_go_on() -> None:
    journal = KeptJournal()
    masked = {"completions": Target("http://t:1", Dialect.HTTP_MASKED), "tokenizer": TokenizerName("toy")}
    _, rollout = first_process(Remote(), journal, **masked)
    await called(rollout, user("a"))
    await asyncio.sleep(1)
    _, rollout = await after(journal, Remote())
    outcome = await outcome_of(rollout)
    assert isinstance(outcome.end, Failure)
    assert "single conversation" in outcome.end.message


async def test_a_drain_suspends_an_agent_elsewhere() -> None:
    journal = KeptJournal()
    harness, rollout = first_process(Remote(), journal)
    first = await called(rollout, user("a"))
    harness.scripts["r1"].says = (Say(seconds=FOREVER),)
    slow = asyncio.create_task(called(rollout, user("a"), first, user("b")))
    await asyncio.sleep(0.5)
    await harness.roster.drain(0)
    with pytest.raises(RolloutOver):  # the service tells the agent to retry
        await slow
    assert rollout.is_suspended
    _, rollout = await after(journal, Remote())
    await called(rollout, user("a"), first, user("b"))
    await finish(rollout, DONE)
    outcome = await outcome_of(rollout)
    assert trained(rollout, outcome) == ["answer 0.1", "answer 2.3"]


async def test_who_may_ask_for_it() -> None:
    resume = {"on_interrupt": InterruptPolicy.RESUME}
    for agent, possible in ((Remote(), True), (Twice(), True), (Once(), False), (Starting(), False)):
        harness = RuntimeHarness(agent, journal=KeptJournal())
        if possible:
            harness.start(**resume)
            await asyncio.sleep(3)
        else:
            with pytest.raises(NotPossible, match="on_restart"):
                harness.start(**resume)


async def test_a_setup_that_may_have_started_the_agent_does_not_run_again() -> None:
    journal = KeptJournal()
    first_process(Starting(), journal)
    await asyncio.sleep(1)
    _, rollout = await after(journal, Starting())
    outcome = await outcome_of(rollout)
    assert isinstance(outcome.end, Failure)
    assert outcome.end.category is Category.INTERRUPTED


class Starting(ExternalAgent):
    """May start the agent in its `setup`, which must not run again."""

    name = "starting"

    async def setup(self, run: Run) -> None: ...


def test_each_kind_of_agent_has_its_values() -> None:
    assert (Remote().on_restart, Starting().on_restart) == ("continue", "end")
    assert Remote(on_restart="end").on_restart == "end"
    wrong: Sequence[tuple[type[Any], str]] = ((Remote, "again"), (Once, "continue"), (Remote, ""))
    for kind, value in wrong:
        with pytest.raises(ValueError, match="on_restart is"):
            kind(on_restart=value)
    for base, values, text in (
        (Agent, {"on_restart": "again"}, "does not own its loop"),
        (Agent, {"on_restart": "ned"}, "on_restart is 'ned'"),
        (Remote, {"replayable": True}, "cannot be replayed"),
    ):
        with pytest.raises(ValueError, match=text):
            type("Wrong", (base,), {"name": "wrong", **values})()


async def test_keys_of_earlier_processes() -> None:
    _, rollout = first_process(Remote(), KeptJournal())
    slot = rollout.capture
    assert (slot.add_key("rk_u1.a"), slot.add_key("rk_u1.a"), slot.add_key("rk_u1.b")) == (True, False, True)
    assert [slot.accepts(key) for key in ("rk_u1.a", "rk_u1.b", "rk_u1.c", "")] == [True, True, False, False]
    for number in range(16):
        slot.add_key(str(number))
    assert len(slot.key_digests) == 16 * 32
    assert not slot.accepts("rk_u1.a")

"""A replay tells apart what the agent did and what its tools did, and ends a rollout as interrupted where it cannot."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from rollout_server import Agent, Limits, Run, tool
from rollout_server.agent.base import Request
from rollout_server.core.message import Message
from rollout_server.core.outcome import Category, Failure, Outcome, Stop
from rollout_server.core.record import Answered, Asked, Observed, ToolReturned, ToolStarted
from rollout_server.core.spec import Dialect, Target
from rollout_server.runtime.errors import AgentMistake, ToolError
from rollout_server.runtime.journal import EntriesAppended
from rollout_server.runtime.models import ModelCompletion, ModelEndpoint, ModelLimits
from rollout_server.runtime.ports import CompletionRequest
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.run.context import calling_tool
from rollout_server.runtime.tools.process_context import context_json

from tests.runtime.test_model_forks import HELP, ScriptedModels
from tests.support.journal import KeptJournal
from tests.support.replayed import ByTurn, Recorded
from tests.support.runtime_harness import ME, RuntimeHarness, Say, Script, call, outcome_of


async def later(seconds: float, value: Any) -> Any:
    """A value that takes some time."""
    await asyncio.sleep(seconds)
    return value


@tool(idempotent=True)
async def work() -> str:
    """Work."""
    return str(await later(2, "ok"))


class BesideTool(Agent):
    """Does one thing while a tool of its own conversation runs."""

    name = "beside_tool"
    replayable = True
    tools = (work,)
    effects = 0

    def __init__(self, does: str) -> None:
        self.does = does

    async def play(self, run: Run) -> None:
        reply = await run.sample()
        await asyncio.gather(run.call(reply.tool_calls), getattr(self, self.does)(run))
        await run.sample()
        await run.sample()

    async def rewards(self, run: Run) -> None:
        run.give_reward(1.0)

    async def acts(self, run: Run) -> None:
        async def effect() -> int:
            BesideTool.effects += 1
            return BesideTool.effects

        await run.once(effect)

    async def forks(self, run: Run) -> None:
        fork = await run.fork([{"role": "user", "content": "x"}])
        await fork.sample()


@pytest.mark.parametrize("does", ["rewards", "acts", "forks"])
async def test_what_the_agent_does_while_its_tool_runs_is_not_the_tools(does: str) -> None:
    BesideTool.effects = 0
    recorded = Recorded(lambda: BesideTool(does), Say("", (call("work"),)), Say("b"))
    await recorded.run()
    for cut in recorded.cuts:
        BesideTool.effects = 0
        await recorded.check(cut)
        had = any(isinstance(record, Observed) for record in await stored_before(recorded, cut))
        assert BesideTool.effects == (does == "acts" and not had)
    assert recorded.obstacles == []


async def stored_before(recorded: Recorded, cut: int) -> Sequence[object]:
    """The records that a process had that continued after this many changes."""
    changes = recorded.changes[: recorded.steps[cut - 1] + 1]
    return [entry.record for change in changes if isinstance(change, EntriesAppended) for entry in change.entries]


class OtherRun(Agent):
    """A tool of a fork rewards the main conversation."""

    name = "other_run"
    replayable = True

    def __init__(self) -> None:
        @tool(idempotent=True)
        async def grade() -> str:
            """Grade."""
            self.main.give_reward(1.0)
            return str(await later(1, "ok"))

        self.tools = (grade,)

    async def play(self, run: Run) -> None:
        self.main = run
        await run.sample()
        fork = await run.fork([HELP])
        await fork.call((await fork.sample()).tool_calls)
        await run.sample()


async def test_a_tool_may_use_another_conversation_than_that_of_its_call() -> None:
    recorded = Recorded(OtherRun, Say("", (call("grade"),)), Say("b"))
    await recorded.run()
    for cut in recorded.cuts:
        await recorded.check(cut)
    returned = recorded.cut_after(ToolReturned)
    assert recorded.obstacles == [returned - 1]


class StateAgent(Agent):
    """Its tool writes what its reward reads."""

    name = "state"

    def __init__(self) -> None:
        @tool(idempotent=True)
        async def submit(run: Run, answer: int) -> str:
            """Submit."""
            run.state["answer"] = answer
            return "thanks"

        self.tools = (submit,)

    async def reward(self, run: Run) -> float:
        return float(run.state.get("answer") == 8)


async def test_what_a_tool_wrote_to_the_state_is_not_lost_silently() -> None:
    recorded = Recorded(StateAgent, Say("", (call("submit", answer=8),)), Say("done"))
    await recorded.run()
    assert recorded.outcome.reward_result.reward == 1
    for cut in recorded.cuts:
        await recorded.check(cut)
    returned = recorded.cut_after(ToolReturned)
    assert recorded.obstacles == [*range(returned, recorded.cuts.stop)]


class SameName(Agent):
    """A fork has another tool of the same name, which must not run twice."""

    name = "same_name"
    replayable = True
    ran = 0

    def __init__(self) -> None:
        @tool(idempotent=True)
        async def act() -> str:
            """Safe."""
            return "safe"

        self.tools = (act,)
        self.other = self.unsafe()

    def unsafe(self) -> Any:
        """The other tool."""

        @tool
        async def act() -> str:
            """Not safe."""
            SameName.ran += 1
            return str(await later(1, "paid"))

        return act

    async def play(self, run: Run) -> None:
        fork = await run.fork([HELP], tools=[self.other])
        await fork.call((await fork.sample()).tool_calls)


class Chooses(Agent):
    """Chooses its tools by request."""

    name = "chooses"

    def choose_tools(self, request: Request) -> Sequence[Any]:
        """One tool."""
        return [work]


async def test_whether_a_call_may_be_repeated_is_that_of_the_tool_that_ran() -> None:
    recorded = Recorded(SameName, Say("", (call("act"),)))
    await recorded.run()
    SameName.ran = 0
    _, rollout, _ = await recorded.cut(recorded.cut_after(ToolStarted))
    assert category_of(await outcome_of(rollout)) is Category.INTERRUPTED
    assert SameName.ran == 0
    for name in ("work", "nothing"):
        recorded = Recorded(Chooses, Say("", (call(name),)), Say("b"))
        await recorded.run()
        await recorded.check(recorded.cut_after(ToolStarted))
        assert recorded.obstacles == []


def category_of(outcome: Outcome) -> Category | None:
    """The category of the rollout's failure."""
    return outcome.end.category if isinstance(outcome.end, Failure) else None


class Judged(Agent):
    """Branches share a judge, and ask it in another order than it answers."""

    name = "judged"
    replayable = True

    async def play(self, run: Run) -> None:
        judge = run.model("judge")
        forks = [await run.fork([{"role": "user", "content": text}]) for text in ("a", "bbb")]
        await asyncio.gather(*(self.one(judge, fork) for fork in forks))
        await run.sample()

    async def one(self, judge: Any, fork: Run) -> None:
        reply = await fork.sample()
        if reply.content == "long":
            await asyncio.sleep(0.01)
        verdict = await judge.sample([{"role": "user", "content": reply.content}])
        fork.give_reward(float(verdict.content))


class Judge(ScriptedModels):
    """Takes longer for long answers."""

    endpoints: ClassVar = {"judge": ModelEndpoint(Target("http://judge", Dialect.VLLM, model="m"), "k")}

    async def complete(self, target: Target, request: CompletionRequest) -> ModelCompletion:
        """Answer 1 for a long text."""
        long = "long" in request.messages[-1].text
        await asyncio.sleep(5 if long else 1)
        return ModelCompletion(Message.write({"role": "assistant", "content": str(int(long))}), "stop", (1, 1), 1)


class ByLength(ByTurn):
    """Answers the branches after different times."""

    async def sample(self, ask: CompletionRequest) -> Answered:
        short = "bbb" in ask.messages[0].text
        await asyncio.sleep(1 + short)
        return replace(Say("short" if short else "long").answer(ask.asked.messages), turn=ask.asked.turn)


async def test_the_answers_of_a_shared_judge_are_not_mixed_up() -> None:
    recorded = Recorded(Judged, script=ByLength, harness={"models": Judge()})
    await recorded.run()
    for cut in recorded.cuts:
        _, rollout, _ = await recorded.cut(cut)
        assert (await outcome_of(rollout)).turn_rewards == recorded.outcome.turn_rewards


class SharedOnce(Agent):
    """Branches call `once` of the same run at the same time."""

    name = "shared_once"
    replayable = True

    async def play(self, run: Run) -> None:
        forks = [await run.fork([{"role": "user", "content": text}]) for text in ("a", "bbb")]
        await asyncio.gather(*(self.one(run, fork, number) for number, fork in enumerate(forks)))
        await run.sample()

    async def one(self, run: Run, fork: Run, number: int) -> None:
        await fork.sample()
        fork.give_reward(await run.once(lambda: later(5 - 4 * number, float(number))))


async def test_concurrent_side_effects_of_one_conversation_are_refused() -> None:
    recorded = Recorded(SharedOnce)
    await recorded.run()
    for cut in recorded.cuts:
        await recorded.check(cut)
    assert recorded.obstacles == [*range(recorded.cut_after(Observed), recorded.cuts.stop)]


@tool(idempotent=True)
async def proxy() -> str:
    """Report the error of another server."""
    raise ToolError("The call was cancelled before it returned")


class Proxy(Agent):
    """Its tool returns the text of a cancelled call."""

    name = "proxy"
    tools = (proxy,)


async def test_the_text_of_a_result_does_not_say_that_the_call_was_cancelled() -> None:
    recorded = Recorded(Proxy, Say("", (call("proxy"),)), Say("b"))
    await recorded.run()
    for cut in recorded.cuts:
        await recorded.check(cut)


class LateReward(Agent):
    """Ends in different ways, and then gives rewards."""

    name = "late_reward"
    replayable = True
    tools = (work,)

    def __init__(self, how: str) -> None:
        self.how = how

    async def play(self, run: Run) -> None:
        try:
            for _ in range(1 if self.how == "finish" else 9):
                await run.call((await run.sample()).tool_calls)
            await run.finish("solved")
        finally:
            run.give_reward(2)

    async def reward(self, run: Run) -> float:
        run.give_reward(0.5)
        await run.once(lambda: later(1, "x"))
        run.give_reward(0.25)
        return float(await later(1, 1.0))


@pytest.mark.parametrize("how", ["finish", "limit"])
async def test_rewards_after_a_limit_or_a_finish_are_replayed_at_once(how: str) -> None:
    recorded = Recorded(lambda: LateReward(how), Say("", (call("work"),)), limits=Limits(turns=2, seconds=200))
    await recorded.run()
    assert recorded.outcome.end == Stop("solved" if how == "finish" else "max_turns")
    for cut in recorded.cuts:
        await recorded.check(cut)


class Critic(Agent):
    """Goes on once it may not ask its critic any more."""

    name = "critic"
    replayable = True

    async def play(self, run: Run) -> None:
        await run.sample()
        critic = await run.fork([HELP], model="critic")
        await critic.sample()
        with pytest.raises(AgentMistake):
            await critic.sample()
        await run.sample()
        await run.sample()


async def test_a_command_that_failed_without_a_record_fails_again() -> None:
    class Few(ScriptedModels):
        """One call."""

        limits = ModelLimits(calls=1)

    recorded = Recorded(Critic, Say("a"), harness={"models": Few(Say("Hm."))}, limits=Limits(seconds=200))
    await recorded.run()
    for cut in recorded.cuts:
        _, rollout, _ = await recorded.cut(cut)
        assert (await outcome_of(rollout)).messages == recorded.outcome.messages


async def test_an_open_turn_of_a_further_model_is_requested_again_whatever_the_trainer_does() -> None:
    class Asks(Critic):
        """Asks once."""

        name = "asks"
        replayable = True

        async def play(self, run: Run) -> None:
            await run.sample()
            await (await run.fork([HELP], model="critic")).sample()

    models, plain = ScriptedModels(Say("Hm.")), Target("http://trainer", Dialect.HTTP_PLAIN)
    recorded = Recorded(Asks, Say("a"), harness={"models": models}, completions=plain)
    await recorded.run()
    _, rollout, _ = await recorded.cut(recorded.cut_after(Asked, 2))
    assert isinstance((await outcome_of(rollout)).end, Stop)


class GivesUp(Agent):
    """Two branches, of which one has a time-out."""

    name = "gives_up"
    replayable = True

    async def play(self, run: Run) -> None:
        await run.sample()
        fork, other = await run.fork(), await run.fork()
        await asyncio.gather(self.thinks(other), self.hurries(fork))
        await run.sample()

    async def hurries(self, run: Run) -> None:
        await run.sample()
        try:
            async with asyncio.timeout(5):
                await run.sample()
        except TimeoutError:
            pass

    async def thinks(self, run: Run) -> None:
        await asyncio.sleep(6)
        await run.append({"role": "user", "content": "b"})


class Slow(Script):
    """Takes four seconds."""

    async def sample(self, ask: CompletionRequest) -> Answered:
        """Answer."""
        await asyncio.sleep(4)
        return replace(Say("a").answer(ask.asked.messages), turn=ask.asked.turn)


async def test_a_turn_that_has_a_completion_in_the_log_cannot_be_given_up() -> None:
    recorded = Recorded(GivesUp, script=Slow, limits=Limits(seconds=5000))
    await recorded.run()
    _, rollout, _ = await recorded.cut(recorded.cut_after(Answered, 3))
    outcome = await outcome_of(rollout)
    assert category_of(outcome) is Category.NOT_REPLAYABLE
    assert isinstance(outcome.end, Failure)
    assert "the agent issued cancellation of turn 3" in outcome.end.message


class OtherReward(Agent):
    """Its reward differs each time."""

    name = "other_reward"
    given = 0

    async def reward(self, run: Run) -> float:
        OtherReward.given += 1
        run.give_reward(OtherReward.given)
        return float(await later(1, 1.0))


async def test_a_reward_that_differs_cannot_be_replayed() -> None:
    recorded = Recorded(OtherReward, Say("a"))
    await recorded.run()
    _, rollout, _ = await recorded.cut(recorded.cuts.stop - 1)
    assert category_of(await outcome_of(rollout)) is Category.NOT_REPLAYABLE


class Pays(Agent):
    """Has a side effect that depends on a completion."""

    name = "pays"
    replayable = True

    def __init__(self, journal: KeptJournal) -> None:
        self.journal = journal
        self.committed: list[object] = []

    async def play(self, run: Run) -> None:
        await run.sample()

        async def pay() -> int:
            changes = [each for each in self.journal.committed if isinstance(each, EntriesAppended)]
            self.committed = [entry.record for change in changes for entry in change.entries]
            return 1

        await run.once(pay)


async def test_a_side_effect_waits_until_what_led_to_it_is_stored() -> None:
    journal = KeptJournal()
    agent = Pays(journal)
    harness = RuntimeHarness(agent, journal=journal)
    await outcome_of(harness.start(Say("pay")))
    assert any(isinstance(record, Answered) for record in agent.committed)
    await harness.close()


async def test_the_downtime_before_each_restart_does_not_count() -> None:
    class Loop(Agent):
        """The default loop."""

        name = "loop"
        tools = (work,)

    says = Say("", (call("work"),), seconds=30)
    recorded = Recorded(Loop, says, script=Script, limits=Limits(seconds=1000, turns=6))
    await recorded.run()
    await asyncio.sleep(5000)
    journal = KeptJournal(recorded.changes[: recorded.steps[recorded.cut_after(ToolReturned) - 1] + 1])
    second = await restored(Loop(), journal, says)
    assert second.earlier_seconds < 35
    await asyncio.sleep(40)
    journal = journal.after_crash()
    await asyncio.sleep(5000)
    third = await restored(Loop(), journal, says)
    assert third.earlier_seconds < 75
    outcome = await outcome_of(third)
    assert outcome.end == Stop("max_turns")
    assert outcome.metrics.total_ms < 225_000


async def restored(agent: Agent, journal: KeptJournal, *says: Say) -> Rollout:
    """The rollout of the journal, in a new process."""
    harness = RuntimeHarness(agent, journal=journal)
    harness.scripts["r1"] = Script(*says)
    await harness.restore()
    (rollout,) = (rollout for _, rollout in harness.roster.select(Selection(ME)))
    return rollout


class TwoTurns(Agent):
    """Samples twice."""

    name = "two_turns"
    replayable = True

    async def play(self, run: Run) -> None:
        await run.sample()
        await run.sample()


async def test_a_deferred_record_that_does_not_fit_ends_the_rollout() -> None:
    recorded = Recorded(TwoTurns, Say("a", seconds=1))
    await recorded.run()
    _, rollout, _ = await recorded.cut(recorded.cut_after(Answered))
    assert rollout.replay is not None
    rollout.replay.defer(Answered(9, Message.write({"role": "assistant", "content": "b"}), "", None))
    outcome = await outcome_of(rollout)
    assert category_of(outcome) is Category.NOT_REPLAYABLE
    assert isinstance(outcome.end, Failure)
    assert "does not fit the log" in outcome.end.message


async def test_a_tool_that_gets_a_copy_of_the_state_has_not_used_it() -> None:
    context = RunningContext()
    caller = calling_tool.set("0/1/0")
    try:
        context_json("whose", cast("Any", context))
    finally:
        calling_tool.reset(caller)
    assert context.callers == [""]


class RunningContext(SimpleNamespace):
    """A tool context that notes who uses its state."""

    def __init__(self) -> None:
        super().__init__(uid="u1", rollout_id="r1", metadata={}, callers=[])

    @property
    def state(self) -> Any:
        """The state."""
        self.callers.append(calling_tool.get())
        return {}

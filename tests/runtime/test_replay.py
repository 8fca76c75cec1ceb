"""An unfinished rollout continues after a restart by a replay of its log, and its outcome is that of an undisturbed run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from rollout_server import Agent, Limits, Run, tool
from rollout_server.core.outcome import Cancellation, Category, Failure, FailureClass, Stop
from rollout_server.core.record import (
    RESAMPLED,
    Answered,
    Asked,
    Forked,
    Note,
    Observed,
    ToolReturned,
    ToolStarted,
)
from rollout_server.core.spec import Dialect, Target
from rollout_server.runtime.ports import CompletionRequest
from rollout_server.runtime.replay_steps import replay_obstacle
from rollout_server.runtime.rollout import Rollout

from tests.support.replayed import ByTurn, Recorded, records_of
from tests.support.runtime_harness import FOREVER, Say, Script, call, outcome_of, wait

ENGINE = Target("http://engine:8000", Dialect.VLLM, model="m")


@tool(idempotent=True)
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    await asyncio.sleep(a / 10)
    return a + b


CALLS = Say("", (call("add", "x", a=1, b=2), call("add", "y", a=3, b=4)), 3)


class Loop(Agent):
    """The default loop."""

    name = "loop"
    tools = (add,)


class Everything(Agent):
    """Uses all commands, in concurrent conversations."""

    name = "everything"
    replayable = True
    tools = (add,)

    async def setup(self, run: Run) -> None:
        await run.append({"role": "user", "content": "at the start"})

    async def play(self, run: Run) -> None:
        reply = await run.sample()
        await run.call(reply.tool_calls)
        run.note("drawn", "a number")
        run.random()
        first, second = await asyncio.gather(run.fork(), run.fork([{"role": "user", "content": "other"}]))
        await asyncio.gather(self.one(run, 3), self.one(first, 2), self.one(second, 2), self.one(await first.fork(), 1))
        run.mask(await run.sample(), "not this one")
        later = await run.fork(after=reply)
        await later.append({"role": "user", "content": "again"})
        await later.sample()

    async def one(self, run: Run, turns: int) -> None:
        for number in range(turns):
            found = [await run.once(lambda: slow(0.3, "a")), await run.once(lambda: slow(0.1, "b"))]
            await run.append({"role": "user", "content": f"{number} {found} {run.now().year}"})
            reply = await run.sample(max_tokens=9 + number)
            run.give_reward(len(reply.content) + number)
            await run.call(reply.tool_calls)

    async def reward(self, run: Run) -> float:
        run.give_reward(0.5)
        return float(sum(run.turn_rewards.values()))


async def slow(seconds: float, value: str) -> str:
    """A value that takes some time."""
    await asyncio.sleep(seconds)
    return value


def found(rollout: Rollout, kind: type[Any]) -> list[Any]:
    """The records of a kind."""
    return [entry.record for entry in rollout.log.entries if isinstance(entry.record, kind)]


@pytest.mark.parametrize(("agent", "says"), [(Loop, [CALLS, Say("7")]), (Everything, [CALLS, Say("no", tokens=2)])])
async def test_a_rollout_continues_from_every_point_of_its_log(agent: type[Agent], says: list[Say]) -> None:
    recorded = Recorded(agent, *says)
    await recorded.run()
    for cut in recorded.cuts:
        await recorded.check(cut)


class Dated(Agent):
    """Writes the time, a random number and the result of a side effect into its conversation."""

    name = "dated"
    replayable = True
    effects = 0

    async def play(self, run: Run) -> None:
        async def effect() -> int:
            Dated.effects += 1
            return Dated.effects

        text = f"{run.now().isoformat()} {run.random().random()} {await run.once(effect)}"
        await run.append({"role": "user", "content": text})
        await run.sample()


async def test_time_randomness_and_side_effects_are_those_of_the_log() -> None:
    recorded = Recorded(Dated, Say("a", seconds=1))
    await recorded.run()
    for cut in range(recorded.cut_after(Observed, 3), recorded.cuts.stop):
        await asyncio.sleep(5)
        Dated.effects = 100
        _, rollout, _ = await recorded.cut(cut)
        assert (await outcome_of(rollout)).messages == recorded.outcome.messages
        assert Dated.effects == 100


class FailsOnce(Agent):
    """Its first side effects fail."""

    name = "fails_once"
    replayable = True

    async def play(self, run: Run) -> None:
        async def broken() -> int:
            raise OSError("no")

        for _ in range(2):
            with pytest.raises(OSError, match="no"):
                await run.once(broken)
        values = [await run.once(lambda n=n: slow(1 - n / 10, str(n))) for n in range(5)]
        await run.append({"role": "user", "content": "".join(values)})
        await run.sample()


async def test_results_of_side_effects_of_which_some_failed_are_not_mixed_up() -> None:
    recorded = Recorded(FailsOnce)
    await recorded.run()
    for cut in recorded.cuts:
        await recorded.check(cut)


async def test_an_open_turn_of_an_engine_is_requested_again_with_a_warning() -> None:
    recorded = Recorded(Loop, CALLS, Say("7"), completions=ENGINE)
    await recorded.run()
    _, rollout, _ = await recorded.cut(recorded.cut_after(Asked, 2))
    outcome = await outcome_of(rollout)
    assert [(note.turn, note.code) for note in found(rollout, Note)] == [(2, RESAMPLED)]
    assert [(warned.code, warned.turn) for warned in outcome.warnings] == [(RESAMPLED, 2)]
    assert len(found(rollout, Asked)) == 2
    _, rollout, _ = await recorded.cut(recorded.cut_after(Answered, 1))
    assert (await outcome_of(rollout)).warnings == ()


async def test_of_a_turn_only_the_calls_without_a_result_run_again() -> None:
    ran: list[int] = []

    @tool(idempotent=True)
    async def count(a: int) -> int:
        """Count."""
        ran.append(a)
        await asyncio.sleep(a)
        return a

    class Counting(Agent):
        """Its tool counts its calls."""

        name = "counting"
        tools = (count,)

    calls = tuple(call("count", f"c{a}", a=a) for a in (1, 2, 3))
    recorded = Recorded(Counting, Say("", calls), Say("end"))
    await recorded.run()
    ran.clear()
    _, rollout, _ = await recorded.cut(recorded.cut_after(ToolReturned, 2))
    outcome = await outcome_of(rollout)
    assert ran == [3]
    assert [record.index for record in found(rollout, ToolStarted)] == [0, 1, 2]
    assert outcome.messages == recorded.outcome.messages
    ran.clear()
    _, rollout, _ = await recorded.cut(recorded.cut_after(ToolStarted, 2))
    assert (await outcome_of(rollout)).messages == recorded.outcome.messages
    assert (sorted(ran), len(found(rollout, ToolStarted))) == ([1, 2, 3], 3)


class Diverging(Agent):
    """Adds a message that can be changed."""

    name = "diverging"
    replayable = True

    def __init__(self, **does: Any) -> None:
        self.does = does

    async def play(self, run: Run) -> None:
        await run.append({"role": "user", "content": self.does.get("says", "a secret")})
        if "waits" in self.does:
            await asyncio.sleep(self.does["waits"])
        if self.does.get("forks"):
            await run.fork()
        if self.does.get("finishes"):
            await run.finish("enough")
        for _ in range(self.does.get("turns", 2)):
            await run.sample()
        if self.does.get("rewards"):
            run.give_reward(1)


@pytest.mark.parametrize(
    ("does", "texts"),
    [
        (
            {"says": "b secret"},
            ["the log has append of 1 message (user, ", "the agent issued append of 1 message (user, "],
        ),
        (
            {"forks": True},
            ["the log has sample with 2 messages (in conversation '0', record 3)", "issued fork (branch)"],
        ),
        ({"finishes": True}, ["the log has sample with 2 messages", "the agent issued finish"]),
        ({"turns": 1}, ["the log has sample with 3 messages", "the agent issued the end of play"]),
        ({"turns": 1, "rewards": True}, ["the log has sample with 3 messages", "issued the end of play"]),
    ],
)
async def test_another_command_ends_the_rollout_and_both_are_shown(does: Mapping[str, Any], texts: list[str]) -> None:
    recorded = Recorded(Diverging, Say("a", tokens=3), Say("b", seconds=1))
    await recorded.run()
    harness, rollout, stored = await recorded.cut(recorded.cut_after(Answered, 2), Diverging(**does))
    outcome = await outcome_of(rollout)
    assert isinstance(outcome.end, Failure)
    assert (outcome.end.category, outcome.end.source) == (Category.NOT_REPLAYABLE, FailureClass.ENVIRONMENT)
    for text in texts:
        assert text in outcome.end.message
    assert "secret" not in outcome.end.message
    assert outcome.messages == recorded.outcome.messages
    assert outcome.metrics.turns == 2
    assert records_of(rollout)[:-1] == stored
    assert harness.script(rollout).asks == []
    await harness.close()


async def test_an_agent_that_leaves_out_a_command_for_ever_does_not_hang() -> None:
    class Skipping(Agent):
        """Two conversations, of which one can be left out."""

        name = "skipping"
        replayable = True

        def __init__(self, *, skips: bool = False) -> None:
            self.skips = skips

        async def play(self, run: Run) -> None:
            fork = await run.fork()
            if not self.skips:
                await fork.sample()
            await run.sample()

    recorded = Recorded(Skipping)
    await recorded.run()
    harness, rollout, _ = await recorded.cut(recorded.cut_after(Answered, 2), Skipping(skips=True))
    outcome = await outcome_of(rollout)
    assert isinstance(outcome.end, Failure)
    assert outcome.end.category is Category.NOT_REPLAYABLE
    assert "the agent issued nothing for 300 s" in outcome.end.message
    await harness.close()


async def test_a_rollout_that_is_cancelled_during_its_replay_has_all_that_was_recorded() -> None:
    recorded = Recorded(Diverging, Say("a", tokens=3), Say("b", seconds=1))
    await recorded.run()
    harness, rollout, stored = await recorded.cut(recorded.cut_after(Answered, 2), Diverging(waits=100))
    await asyncio.sleep(10)
    assert rollout.machine.turn == 0
    rollout.ending.request(Cancellation("enough"))
    outcome = await outcome_of(rollout)
    assert outcome.end == Cancellation("enough")
    assert outcome.messages == recorded.outcome.messages
    assert records_of(rollout)[:-1] == stored
    await harness.close()


async def test_the_time_before_the_restart_counts_and_the_downtime_does_not() -> None:
    recorded = Recorded(Loop, Say("", (call("add", a=1, b=1),), seconds=30), script=Script, limits=Limits(seconds=100))
    await recorded.run()
    await asyncio.sleep(10_000)
    harness, rollout, _ = await recorded.cut(recorded.cut_after(ToolReturned), None, Say(seconds=FOREVER))
    began = asyncio.get_running_loop().time()
    outcome = await outcome_of(rollout)
    assert isinstance(outcome.end, Failure)
    assert outcome.end.category is Category.TIMEOUT
    assert asyncio.get_running_loop().time() - began == pytest.approx(100 - 30.1)
    assert outcome.metrics.total_ms == pytest.approx(100_000)
    assert outcome.metrics.queued_ms == pytest.approx(0)
    await harness.close()


class Nested(Agent):
    """Its tool samples in a conversation of its own, and gives a reward."""

    name = "nested"
    replayable = True

    def __init__(self) -> None:
        @tool(idempotent=True)
        async def ask(run: Run) -> str:
            """Ask another conversation."""
            fork = await run.fork([{"role": "user", "content": "help"}])
            reply = await fork.sample()
            run.give_reward(float(await run.once(lambda: slow(0.1, "2"))))
            return reply.content

        self.tools = (ask,)

    async def play(self, run: Run) -> None:
        reply = await run.sample()
        await run.call(reply.tool_calls)
        await run.once(lambda: slow(0.1, "3"))
        await run.sample()


async def test_a_tool_that_used_the_rollout_is_not_called_again_once_it_returned() -> None:
    recorded = Recorded(Nested, Say("a", (call("ask"),)), Say("b"))
    await recorded.run()
    returned, obstacles = recorded.cut_after(ToolReturned), []
    for cut in recorded.cuts:
        _, rollout, stored = await recorded.cut(cut)
        obstacles += [cut] if replay_obstacle(stored) else []
        outcome = await outcome_of(rollout)
        interrupted = isinstance(outcome.end, Failure) and outcome.end.category is Category.INTERRUPTED
        assert interrupted == (cut in obstacles)
        if not interrupted:
            assert outcome.messages == recorded.outcome.messages
            assert [len(segment) for segment in outcome.segments] == [len(s) for s in recorded.outcome.segments]
            assert outcome.turn_rewards == recorded.outcome.turn_rewards
    assert obstacles == [*range(recorded.cut_after(Forked), returned)]


class Impeded(ByTurn):
    """A trainer that never completes a turn of a fork."""

    async def sample(self, ask: CompletionRequest) -> Answered:
        answered = await super().sample(ask)
        await wait(FOREVER if ask.asked.segment_id != "0" else 0)
        return answered


class Impatient(Agent):
    """Cancels a completion of a fork, and a tool call."""

    name = "impatient"
    replayable = True

    def __init__(self) -> None:
        @tool(idempotent=True)
        async def never() -> str:
            """Never return."""
            await asyncio.sleep(FOREVER)
            return ""

        self.tools = (never,)

    async def play(self, run: Run) -> None:
        reply = await run.sample()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await run.call(reply.tool_calls)
        fork = await run.fork()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await fork.sample()
        await run.sample()


async def test_what_the_agent_cancelled_is_cancelled_again() -> None:
    recorded = Recorded(Impatient, Say("a", (call("never"),)), Say("b", seconds=2), script=Impeded)
    await recorded.run()
    assert recorded.outcome.end == Stop("stop")
    for cut in recorded.cuts:
        await recorded.check(cut)

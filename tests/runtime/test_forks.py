"""Several conversations in one rollout: shared state, separate state, and what ends all of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rollout_server import Agent, Limits, Run, tool
from rollout_server.core.ledger import SegmentKind
from rollout_server.core.outcome import Category, Failure, Stop
from rollout_server.core.record import Asked, Ended, Forked, GivenUp
from rollout_server.runtime.errors import AgentMistake

from tests.support.runtime_harness import FOREVER, RuntimeHarness, Say, assert_internal, call, contents, outcome_of

HELP = {"role": "user", "content": "Help."}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "d", "type": "function", "function": {"name": "ping", "arguments": "{}"}}],
}


@tool
async def ping() -> str:
    """Answers."""
    return "pong"


async def test_limits_are_the_rollouts(new_world: type[RuntimeHarness]) -> None:
    class Many(Agent):
        name = "many"

        async def play(self, run: Run) -> None:
            await run.sample()
            forks = [await run.fork() for _ in range(5)]
            await asyncio.gather(*(fork.sample() for fork in forks))

    world = new_world(Many())
    rollout = world.start(Say("8", seconds=1), limits=Limits(turns=4))
    outcome = await outcome_of(rollout)
    assert outcome.end == Stop("max_turns")
    asked = [entry.record for entry in rollout.log.entries if isinstance(entry.record, Asked)]
    assert [(each.turn, each.segment_id) for each in asked] == [(1, "0"), (2, "1"), (3, "2"), (4, "3")]
    assert [each.turn_key for each in asked] == ["u1/0/1", "u1/1/2", "u1/2/3", "u1/3/4"]


async def test_tools_run_in_each_conversation_for_itself(new_world: type[RuntimeHarness]) -> None:
    seen: list[object] = []

    class Calling(Agent):
        name = "calling"

        async def play(self, run: Run) -> None:
            calls = (await run.sample()).tool_calls
            other = await run.fork([HELP, CALLED], tools=[ping])
            branch = await run.fork()
            done = await asyncio.gather(run.call(calls), branch.call(calls), other.call([call("ping", "d")]))
            seen.extend([[result.content for result in results] for results in done])
            seen.extend(each.messages[-1]["tool_call_id"] for each in (run, branch, other))
            await asyncio.gather(run.sample(), branch.sample(), other.sample())

    outcome = await outcome_of(new_world(Calling()).start(Say("", (call("ping"),)), Say("done")))
    unknown = "Error: Unknown function 'ping'. Available: []"
    assert seen == [[unknown], [unknown], ["pong"], "c", "c", "d"]
    assert outcome.end == Stop("stop")
    assert [segment.origin.kind for segment in outcome.segments] == [
        SegmentKind.MAIN,
        SegmentKind.BRANCH,
        SegmentKind.SUBAGENT,
    ]
    assert (outcome.metrics.turns, outcome.metrics.tool_calls, outcome.metrics.tool_failures) == (4, 3, 2)
    assert contents(outcome, "assistant") == ["", "done"]


async def test_a_run_that_a_compaction_replaced_can_end_the_rollout(new_world: type[RuntimeHarness]) -> None:
    class Finishing(Agent):
        name = "finishing"

        async def play(self, run: Run) -> None:
            await run.sample()
            await (await run.fork([HELP], kind="compaction")).sample()
            await run.finish("enough")

    world = new_world(Finishing())
    outcome = await outcome_of(world.start(Say("a"), Say("b")))
    assert outcome.end == Stop("enough")


async def test_after_a_compaction_the_rollout_goes_on_with_it(new_world: type[RuntimeHarness]) -> None:
    told: list[str] = []
    judged: list[object] = []

    class Compacting(Agent):
        name = "compacting"

        async def play(self, run: Run) -> None:
            await run.sample()
            shorter = await run.fork([HELP], kind="compaction")
            for attempt in (run.sample, run.fork, lambda: run.append(HELP), lambda: run.fork([HELP])):
                with pytest.raises(AgentMistake) as mistake:
                    await attempt()
                told.append(str(mistake.value))
            await shorter.sample()

        async def reward(self, run: Run) -> float:
            judged.extend(run.messages)
            return 1.0

    rollout = new_world(Compacting()).start(Say("8"), Say("9", finish_reason="length"))
    outcome = await outcome_of(rollout)
    assert [text.split(":")[0] for text in told] == ["the conversation is closed after turn 1"] * 4
    assert outcome.end == Stop("stop", truncated=True)
    assert contents(outcome, "user") == ["Help."]
    assert judged == [HELP, {"role": "assistant", "content": "9"}]
    assert [segment.origin.kind for segment in outcome.segments] == [SegmentKind.MAIN, SegmentKind.COMPACTION]


async def test_a_fork_may_be_given_up_and_the_rollout_goes_on(new_world: type[RuntimeHarness]) -> None:
    class Racing(Agent):
        name = "racing"

        async def play(self, run: Run) -> None:
            await run.sample()
            branch = await run.fork()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await branch.sample()
            with pytest.raises(AgentMistake, match="its completion was abandoned"):
                await branch.sample()
            await run.append(HELP)
            await run.sample()

    rollout = new_world(Racing()).start(Say("8"), Say(seconds=FOREVER), Say("9"))
    outcome = await outcome_of(rollout)
    assert outcome.end == Stop("stop")
    assert (len(outcome.segments), outcome.metrics.turns) == (1, 2)
    assert [e.record for e in rollout.log.entries if isinstance(e.record, GivenUp)] == [GivenUp(2, "1")]


async def test_the_end_of_one_conversation_ends_all_and_leaves_no_task(new_world: type[RuntimeHarness]) -> None:
    class Gathering(Agent):
        name = "gathering"

        async def play(self, run: Run) -> None:
            await run.sample()
            forks = [await run.fork() for _ in range(3)]
            await asyncio.gather(*(fork.sample() for fork in forks))

    failure = Failure(Category.NETWORK, "gone", 3)
    rollout = new_world(Gathering()).start(Say("8"), Say(seconds=FOREVER), Say(failure=failure, seconds=1))
    before = asyncio.all_tasks()
    outcome = await outcome_of(rollout)
    assert isinstance(outcome.end, Failure)
    assert outcome.end.message == "gone"
    await asyncio.sleep(1)
    assert {task for task in asyncio.all_tasks() - before if not task.done()} == set()
    assert [type(e.record) for e in rollout.log.entries].count(Ended) == 1


async def test_a_subagent_may_begin_while_its_parent_is_busy(new_world: type[RuntimeHarness]) -> None:
    class Busy(Agent):
        name = "busy"

        async def play(self, run: Run) -> None:
            first = asyncio.create_task(run.sample())
            await asyncio.sleep(0)
            with pytest.raises(AgentMistake, match="the rollout is asking in turn 1"):
                await run.fork()
            with pytest.raises(AgentMistake, match="the rollout is asking in turn 1"):
                await run.fork([HELP], kind="compaction")
            await (await run.fork([HELP])).sample()
            await first

    outcome = await outcome_of(new_world(Busy()).start(Say("8", seconds=5), Say("9")))
    assert outcome.end == Stop("stop")
    assert [segment.id for segment in outcome.segments] == ["1", "0"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"colour": "red"}, "colour is not an option; the options are kind, tools, role, trainable, model, after"),
    ({"kind": "twin"}, "kind is 'twin'; it must be one of branch, subagent, compaction"),
    ({"messages": [HELP], "kind": "branch"}, "a branch continues this conversation"),
    ({"tools": [ping]}, "to change tools, pass messages"),
    ({"kind": "subagent"}, "a subagent needs its initial messages"),
    ({"messages": []}, "a subagent needs its initial messages"),
    ({"messages": [{"content": "no role"}]}, "not a message"),
    ({"messages": [HELP], "tools": [len]}, "is not a tool"),
    ({"messages": [HELP], "tools": [ping, ping]}, "more than one tool is named 'ping'"),
]


@pytest.mark.parametrize(("arguments", "text"), WRONG)
async def test_a_fork_that_makes_no_sense_is_named(
    new_world: type[RuntimeHarness], arguments: dict[str, Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(Agent):
        name = "wrong"

        async def play(self, run: Run) -> None:
            await run.sample()
            await run.fork(**arguments)

    rollout = new_world(Wrong()).start()
    assert_internal(await outcome_of(rollout))
    assert text in caplog.text
    assert [e.record for e in rollout.log.entries if isinstance(e.record, Forked)] == []

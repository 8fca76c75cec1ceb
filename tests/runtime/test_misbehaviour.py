"""Less usual faults of agents, tools and samplers."""

from __future__ import annotations

import asyncio
import sys

import pytest
from rollout_server import Agent, Limits, Run, tool
from rollout_server.core.outcome import Category, Failure, Stop

from tests.support.jumping_loop import JumpingLoop
from tests.support.runtime_harness import (
    FOREVER,
    RuntimeHarness,
    Say,
    call,
    contents,
    outcome_of,
    wait,
)


async def test_the_end_is_known_inside_a_group_of_tasks(new_world: type[RuntimeHarness]) -> None:
    class Grouping(Agent):
        name = "grouping"

        async def play(self, run: Run) -> None:
            while True:
                async with asyncio.TaskGroup() as group:
                    group.create_task(run.sample())

    outcome = await outcome_of(new_world(Grouping()).start(limits=Limits(turns=2)))
    assert outcome.end == Stop("max_turns")


class OwnException(BaseException):
    """Like the exceptions of some test and task libraries, it does not derive from `Exception`."""


@pytest.mark.parametrize("part", ["play", "reward"])
async def test_an_agent_that_raises_no_exception_proper_is_internal_too(
    new_world: type[RuntimeHarness], part: str
) -> None:
    class Odd(Agent):
        name = "odd"

        async def play(self, run: Run) -> None:
            if part == "play":
                raise OwnException

        async def reward(self, run: Run) -> float:
            raise OwnException

    assert_category(await outcome_of(new_world(Odd()).start()), Category.INTERNAL)


@tool
async def leave() -> str:
    """Thinks that it is a script."""
    sys.exit(1)


class Leaving(Agent):
    """Exit in the given place."""

    name = "leaving"
    tools = (leave,)

    async def play(self, run: Run) -> None:
        if run.metadata["in"] == "play":
            sys.exit(1)
        await super().play(run)


@pytest.mark.parametrize(("part", "end"), [("play", Failure), ("tool", Stop)])
def test_an_agent_that_calls_sys_exit_does_not_end_the_server(part: str, end: type[object]) -> None:
    async def play() -> None:
        world = RuntimeHarness(Leaving())
        leaving = world.start(Say("", (call("leave"),)), Say("done"), metadata_json=f'{{"in": "{part}"}}')
        assert isinstance((await outcome_of(leaving)).end, end)

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.get_loop().set_exception_handler(lambda loop, context: None)  # of tasks that nothing can await any more
        runner.run(play())


@tool
async def gives_up() -> str:
    """Awaits something that somebody else has cancelled."""
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future
    return ""


class GivesUp(Agent):
    """An agent with the default loop and such a tool."""

    name = "gives-up"
    tools = (gives_up,)


async def test_a_tool_that_fails_by_a_cancellation_of_its_own_answers_the_model(
    new_world: type[RuntimeHarness],
) -> None:
    outcome = await outcome_of(new_world(GivesUp()).start(Say("", (call("gives_up"),)), Say("done")))
    assert outcome.end == Stop("stop")
    assert [str(content)[:6] for content in contents(outcome, "tool")] == ["Error:"]


@tool
async def never() -> str:
    """Never returns."""
    await wait(FOREVER)
    return ""


async def test_an_agent_may_bound_the_time_of_its_calls(new_world: type[RuntimeHarness]) -> None:
    class Impatient(Agent):
        name = "impatient"
        tools = (never,)

        async def play(self, run: Run) -> None:
            while calls := (await run.sample()).tool_calls:
                try:
                    async with asyncio.timeout(10):
                        await run.call(calls)
                except TimeoutError:
                    run.note("slow", "went on without the results")

    outcome = await outcome_of(new_world(Impatient()).start(Say("", (call("never"),)), Say("done")))
    assert outcome.end == Stop("stop")
    assert contents(outcome, "tool") == ["Error: The call was cancelled before it returned"]


@pytest.mark.parametrize("rounds", range(12))
async def test_many_calls_may_be_given_up_at_any_moment(new_world: type[RuntimeHarness], rounds: int) -> None:
    """Also while they start, which takes some iterations of the event loop: each call that started has its result."""

    class Hasty(Agent):
        name = "hasty"
        tools = (never,)

        async def play(self, run: Run) -> None:
            while calls := (await run.sample()).tool_calls:
                calling = asyncio.create_task(run.call(calls))
                for _ in range(rounds):
                    await asyncio.sleep(0)
                calling.cancel()
                await asyncio.wait([calling])

    says = Say("", tuple(call("never", f"c{index}") for index in range(100)))
    outcome = await outcome_of(new_world(Hasty()).start(says, Say("done")))
    assert outcome.end == Stop("stop")
    results = contents(outcome, "tool")
    assert results == ["Error: The call was cancelled before it returned"] * len(results)
    assert len(results) == outcome.metrics.tool_calls


async def test_calls_of_a_turn_are_counted_together_however_they_are_made(new_world: type[RuntimeHarness]) -> None:
    @tool
    async def nothing() -> str:
        """Does nothing."""
        return "ran"

    class OneByOne(Agent):
        name = "one-by-one"
        tools = (nothing,)

        async def play(self, run: Run) -> None:
            for wanted in (await run.sample()).tool_calls:
                await run.call([wanted])

    says = Say("", tuple(call("nothing", f"c{index}") for index in range(3)))
    outcome = await outcome_of(new_world(OneByOne()).start(says, limits=Limits(calls_per_turn=2)))
    assert [content == "ran" for content in contents(outcome, "tool")] == [True, True, False]


def assert_category(outcome: object, category: Category) -> None:
    end = getattr(outcome, "end", None)
    assert isinstance(end, Failure)
    assert end.category is category

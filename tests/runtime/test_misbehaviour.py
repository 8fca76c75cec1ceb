"""Agents, tools and samplers that misbehave in less usual ways."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections.abc import Sequence

import pytest
from rollout_server import Agent, Limits, Run, tool
from rollout_server.core.outcome import Category, Failure, Stop
from rollout_server.core.spec import Spec
from rollout_server.runtime.port import Clock, Credentials, Sampler, Tool
from rollout_server.runtime.roster import Roster
from rollout_server.runtime.run import RolloutOver
from rollout_server.runtime.wish import Capacity, Selection, Wish

from tests.runtime.jumping import JumpingLoop
from tests.runtime.world import (
    EPOCH,
    FOREVER,
    Looping,
    Say,
    Script,
    World,
    a_spec,
    a_wish,
    call,
    contents,
    outcome_of,
    wait,
)


async def test_an_agent_that_swallows_its_end_and_asks_again_lets_others_run(new_world: type[World]) -> None:
    beats: list[int] = []

    class Deaf(Agent):
        name = "deaf"

        async def play(self, run: Run) -> None:
            for _ in range(100):  # a `while True` of the same kind is never left, not even by a cancellation
                try:
                    await run.sample()
                except BaseException:
                    beats.append(beat)

    rollout = new_world(Deaf()).start(limits=Limits(turns=1))
    beat = 0
    while rollout.outcome is None:
        beat += 1
        await asyncio.sleep(0.001)
    assert beats[0] < beats[-1]


async def test_an_agent_that_swallows_its_end_and_sleeps_has_ended_all_the_same(new_world: type[World]) -> None:
    class Sleepy(Agent):
        name = "sleepy"

        async def play(self, run: Run) -> None:
            try:
                await super().play(run)
                await run.sample()
            except RolloutOver:
                await wait(FOREVER)

    outcome = await outcome_of(new_world(Sleepy()).start(limits=Limits(turns=1, seconds=60)))
    assert outcome.end == Stop("max_turns")


async def test_the_end_is_known_inside_a_group_of_tasks(new_world: type[World]) -> None:
    class Grouping(Agent):
        name = "grouping"

        async def play(self, run: Run) -> None:
            while True:
                async with asyncio.TaskGroup() as group:
                    group.create_task(run.sample())

    outcome = await outcome_of(new_world(Grouping()).start(limits=Limits(turns=2)))
    assert outcome.end == Stop("max_turns")


class OwnException(BaseException):
    """Not an `Exception`, as that of some test and task libraries."""


@pytest.mark.parametrize("part", ["play", "reward"])
async def test_an_agent_that_raises_no_exception_proper_is_internal_too(new_world: type[World], part: str) -> None:
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
    """Leaves where it is told to."""

    name = "leaving"
    tools = (leave,)

    async def play(self, run: Run) -> None:
        if run.metadata["in"] == "play":
            sys.exit(1)
        await super().play(run)


@pytest.mark.parametrize(("part", "end"), [("play", Failure), ("tool", Stop)])
def test_an_agent_that_calls_sys_exit_does_not_end_the_server(part: str, end: type[object]) -> None:
    async def play() -> None:
        world = World(Leaving())
        leaving = world.start(Say("", (call("leave"),)), Say("done"), metadata_json=f'{{"in": "{part}"}}')
        assert isinstance((await outcome_of(leaving)).end, end)

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.get_loop().set_exception_handler(
            lambda loop, context: None
        )  # of tasks that nobody can wait for any more
        runner.run(play())


@tool
async def gives_up() -> str:
    """Awaits something that somebody else has cancelled."""
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future
    return ""


class GivesUp(Agent):
    """Plays the default loop with such a tool."""

    name = "gives-up"
    tools = (gives_up,)


async def test_a_tool_that_fails_by_a_cancellation_of_its_own_answers_the_model(new_world: type[World]) -> None:
    outcome = await outcome_of(new_world(GivesUp()).start(Say("", (call("gives_up"),)), Say("done")))
    assert outcome.end == Stop("stop")
    assert [str(content)[:6] for content in contents(outcome, "tool")] == ["Error:"]


@tool
async def never() -> str:
    """Never returns."""
    await wait(FOREVER)
    return ""


async def test_an_agent_may_bound_the_time_of_its_calls(new_world: type[World]) -> None:
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


async def test_calls_of_a_turn_are_counted_together_however_they_are_made(new_world: type[World]) -> None:
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


def open_unless_bad(uid: str, spec: Spec, tools: Sequence[Tool]) -> Sampler:
    """Opens samplers, but not for rollouts that are called bad."""
    if spec.rollout_id == "bad":
        raise OSError("no such tokenizer")
    return Script(Say("done", seconds=10))


def unready_roster() -> Roster:
    uids = iter("abcdefgh")
    return Roster([Looping()], open_unless_bad, lambda: next(uids), capacity=Capacity(running=1))


async def test_a_rollout_whose_sampler_cannot_be_opened_is_refused_or_ends() -> None:
    roster = unready_roster()
    try:
        roster.start(a_wish("key", rollout_id="bad"))
    except OSError:
        assert [*roster.select(Selection("me"))] == []
    else:
        await asyncio.sleep(1)
        assert [rollout.outcome is not None for _, rollout in roster.select(Selection("me"))] == [True]


async def test_a_sampler_that_cannot_be_opened_does_not_hold_the_queue() -> None:
    roster = unready_roster()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    rollouts = [roster.start(Wish(a_spec(rollout_id=name), "me"))[0] for name in ("first", "bad", "last")]
    await asyncio.sleep(60)
    assert [rollout.outcome is not None for rollout in rollouts] == [True, True, True]


async def test_a_rollout_that_was_cancelled_in_the_queue_and_forgotten_is_let_go() -> None:
    world = World(capacity=Capacity(running=1, finished=0))
    world.start(Say(seconds=FOREVER))
    world.start()
    queued = weakref.ref(world.rollouts.pop())
    world.roster.cancel(Selection("me", rollout_ids=("r2",)), "")
    await asyncio.sleep(1)
    gc.collect()
    kept = queued() is not None
    await world.roster.drain(0)
    assert not kept


async def test_what_finished_at_the_beginning_of_time_is_forgotten_too() -> None:
    now = [0.0]
    roster = Roster(
        [Looping()],
        lambda uid, spec, tools: Script(),
        lambda: "u",
        capacity=Capacity(finished_seconds=60),
        clock=Clock(lambda: now[0], lambda: now[0]),
    )
    await outcome_of(roster.start(a_wish())[0])
    await asyncio.sleep(1)
    now[0] = EPOCH
    roster.forget()
    assert [*roster.select(Selection("me"))] == []


async def test_a_rollout_that_has_ended_takes_no_credential(new_world: type[World]) -> None:
    world = new_world()
    rollout, _ = world.wish(a_wish("key", key="hunter2"))
    await outcome_of(rollout)
    await asyncio.sleep(1)
    world.wish(a_wish("key", key="hunter2"))
    assert rollout.credentials == Credentials()


def assert_category(outcome: object, category: Category) -> None:
    end = getattr(outcome, "end", None)
    assert isinstance(end, Failure)
    assert end.category is category

"""A tool's parameter annotated `Run` or `ToolContext` gets the rollout that calls the tool, and the model does not see it."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from types import SimpleNamespace
from typing import Annotated, Any, Optional, cast

import pytest
from rollout_server import Agent, Limits, Run, ToolContext, tool
from rollout_server.core.outcome import Stop
from rollout_server.core.record import Observed
from rollout_server.runtime.errors import ArgumentError
from rollout_server.runtime.registry.selection import Selection
from rollout_server.tool import FunctionTool

from tests.support.runtime_harness import FOREVER, ME, RuntimeHarness, Say, call, contents, outcome_of

ROLLOUTS = 50


@tool
async def put(fruit: str, context: ToolContext) -> str:
    """Put a fruit into the basket.

    Args:
        fruit: its name.
        context: not for the model.
    """
    context.state.setdefault("basket", []).append(fruit)
    return f"{context.rollout_id}: {', '.join(context.state['basket'])}"


def a_context(**fields: object) -> ToolContext:
    return cast("ToolContext", SimpleNamespace(rollout_id="r", state={}, **fields))


def properties(of: FunctionTool[Any, Any]) -> dict[str, Any]:
    schema = json.loads(of.parameters_json_schema)
    assert "context" not in json.dumps(schema)
    return cast("dict[str, Any]", schema["properties"])


def test_the_model_does_not_see_it() -> None:
    assert properties(put) == {"fruit": {"type": "string", "description": "its name."}}
    assert json.loads(put.parameters_json_schema)["required"] == ["fruit"]
    assert put.description == "Put a fruit into the basket."


def test_it_may_stand_anywhere_and_be_annotated_or_optional() -> None:
    @tool
    def first(context: Run, a: int) -> int:
        return a

    @tool
    def last(a: int, *, context: Annotated[ToolContext, "the rollout"]) -> int:
        return a

    @tool
    def optional(a: int, context: Optional[Run] = None, more: ToolContext | None = None) -> int:  # noqa: UP045
        return a

    class Priced:
        def price(self, a: int, context: Run) -> int:
            return a

    for each in (first, last, optional, tool(Priced().price)):
        assert list(properties(each)) == ["a"]

    @tool
    def alone(context: Run) -> int:
        return 1

    assert properties(alone) == {}


def test_what_only_contains_it_is_no_context() -> None:
    def several(runs: list[Run]) -> None: ...

    def mixed(run: Run | str) -> None: ...

    for function in (several, mixed):
        with pytest.raises(TypeError, match="has no JSON Schema; use strings"):
            tool(function)


def test_a_cached_tool_takes_no_context() -> None:
    async def look_up(word: str, run: Run) -> str:
        return word

    says = r"tool 'look_up': cache shares results between rollouts, and parameter run differs .* remove one of the two \(.*:\d+\)"
    with pytest.raises(ValueError, match=says):
        tool(idempotent=True, cache=True)(look_up)


async def test_an_author_passes_it_himself() -> None:
    context = a_context()
    assert await put("pear", context) == "r: pear"
    assert await put.run({"fruit": "fig"}, context) == "r: pear, fig"
    with pytest.raises(ArgumentError, match="context: unknown parameter"):
        await put.run({"fruit": "fig", "context": {}}, context)
    with pytest.raises(
        TypeError, match=r"parameter context needs the rollout.* `await put.run\(arguments, context\)` \("
    ):
        await put.run({"fruit": "fig"})


async def test_fifty_rollouts_of_two_agents_share_their_tools_and_no_state(new_world: type[RuntimeHarness]) -> None:
    inside, all_inside = asyncio.Barrier(ROLLOUTS), threading.Barrier(ROLLOUTS)
    seen: dict[str, list[object]] = {}

    @tool
    async def meet(context: Run) -> str:
        """Waits on the event loop until all rollouts are in it."""
        seen.setdefault(context.uid, []).append(context)
        context.state["loop"] = context.rollout_id
        await inside.wait()
        return f"{context.state['loop']} {context.metadata['number']}"

    @tool
    def meet_in_threads(context: ToolContext) -> str:
        """Waits in a thread until all rollouts are in it."""
        assert threading.current_thread() is not threading.main_thread()
        seen.setdefault(context.uid, []).append(context)
        context.state["thread"] = context.rollout_id
        all_inside.wait(60)
        return f"{context.state['thread']} {context.metadata['number']}"

    class Meeting(Agent):
        name = "meeting"
        tools = (meet, meet_in_threads, put)

        async def reward(self, run: Run) -> float:
            own = run.rollout_id
            return float(run.state == {"loop": own, "thread": own, "basket": [own, own]})

    class Other(Meeting):
        name = "other"

    world, rollouts = new_world(Meeting(), Other()), []
    for number in range(ROLLOUTS):
        own = f"r{number + 1}"
        both = Say("", (call("meet", "c1"), call("meet_in_threads", "c2"), call("put", "c3", fruit=own)))
        alone = Say("", (call("put", fruit=own),))
        fields = {"metadata_json": json.dumps({"number": number}), "agent": ("meeting", "other")[number % 2]}
        rollouts.append(world.start(both, alone, Say("done"), **fields))
    for number, rollout in enumerate(rollouts):
        outcome, own = await outcome_of(rollout), rollout.spec.rollout_id
        assert contents(outcome, "tool") == [f"{own} {number}"] * 2 + [f"{own}: {own}", f"{own}: {own}, {own}"]
        assert outcome.reward_result.reward == 1.0
        first, second = seen[rollout.uid]
        assert first is second  # the real one
        assert isinstance(first, Run)
    assert len(seen) == ROLLOUTS


async def test_it_is_the_conversation_that_calls(new_world: type[RuntimeHarness]) -> None:
    callers: list[Run] = []

    @tool
    async def delegate(task: str, run: Run) -> str:
        """Lets a subagent do it."""
        callers.append(run)
        if task == "small":
            return "done at once"
        helper = await run.fork([{"role": "user", "content": task}])
        reply = await helper.sample()
        (result,) = await helper.call(reply.tool_calls)
        assert callers == [run, helper]
        return f"the helper says: {result.text}"

    class Delegating(Agent):
        name = "delegating"
        tools = (delegate,)

    says = (Say("", (call("delegate", task="large"),)), Say("", (call("delegate", task="small"),)), Say("done"))
    outcome = await outcome_of(new_world(Delegating()).start(*says))
    assert contents(outcome, "tool") == ["the helper says: done at once"]
    assert len(outcome.segments) == 2


@pytest.mark.parametrize("method", ["sample", "append", "finish"])
async def test_a_conversation_that_waits_for_its_tool_goes_no_further(
    new_world: type[RuntimeHarness], method: str
) -> None:
    @tool
    async def go_on(run: Run) -> object:
        """Uses the conversation that waits for it."""
        return await getattr(run, method)()

    class Hasty(Agent):
        name = "hasty"
        tools = (go_on,)

    outcome = await outcome_of(new_world(Hasty()).start(Say("", (call("go_on"),)), Say("done")))
    (content,) = contents(outcome, "tool")
    assert str(content).startswith("Error: the rollout is calling in turn 1: await the pending operation")
    assert outcome.end == Stop("stop")


async def test_time_chance_and_effects_are_recorded_in_loop_and_thread(new_world: type[RuntimeHarness]) -> None:
    @tool
    async def here(context: ToolContext) -> list[object]:
        """On the event loop."""
        return [context.now().isoformat(), context.random().random(), await context.once(lambda: 7)]

    @tool
    def there(run: Run) -> list[object]:
        """In a thread."""
        return [run.now().isoformat(), run.random().random(), run.wait(run.once(lambda: 8))]

    class Observing(Agent):
        name = "observing"
        tools = (here, there)

    world = new_world(Observing())
    for name, once in (("here", 7), ("there", 8)):
        rollout = world.start(Say("", (call(name),)), Say("done"))
        (content,) = contents(await outcome_of(rollout), "tool")
        time, drawn, result = json.loads(str(content))
        records = [entry.record for entry in rollout.log.entries if isinstance(entry.record, Observed)]
        assert [record.what for record in records] == ["now", "random", "once"]
        assert (json.loads(records[0].value_json), result) == (time, once)
        assert 0 <= drawn < 1


async def test_its_logger_names_the_rollout(new_world: type[RuntimeHarness], caplog: pytest.LogCaptureFixture) -> None:
    @tool
    def speak(context: ToolContext) -> None:
        """Logs a line."""
        context.logger.warning("the basket is %s", "empty")

    class Speaking(Agent):
        name = "speaking"
        tools = (speak,)

    rollout = new_world(Speaking()).start(Say("", (call("speak"),)), Say("done"))
    await outcome_of(rollout)
    (line,) = [record for record in caplog.records if record.name == "rollout_server.agent.speaking"]
    assert (line.levelno, line.getMessage()) == (logging.WARNING, "the basket is empty")
    fields = vars(line)
    assert (fields["rollout_uid"], fields["rollout_id"], fields["turn"]) == (rollout.uid, "r1", 1)


async def test_a_thread_hears_of_the_end_of_its_rollout(new_world: type[RuntimeHarness]) -> None:
    began, heard = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    @tool
    def poll(context: ToolContext) -> None:
        """Works until the rollout ends."""
        loop.call_soon_threadsafe(began.set)
        while not context.cancelled:
            heard.wait(0.01)
        heard.set()

    class Polling(Agent):
        name = "polling"
        tools = (poll,)

    world = new_world(Polling())
    rollout = world.start(Say("", (call("poll"),)), Say("done", seconds=FOREVER))
    await began.wait()
    assert not heard.is_set()
    world.roster.cancel(Selection(ME, uids=(rollout.uid,)), "enough")
    await outcome_of(rollout)
    assert await asyncio.to_thread(heard.wait, 60)


async def test_each_attempt_gets_it(new_world: type[RuntimeHarness]) -> None:
    @tool(idempotent=True, retries=2)
    async def flaky(context: ToolContext) -> int:
        """Works at the third attempt."""
        context.state["attempts"] = context.state.get("attempts", 0) + 1
        if context.state["attempts"] < 3:
            raise OSError
        return cast("int", context.state["attempts"])

    class Patient(Agent):
        name = "patient"
        tools = (flaky,)

    outcome = await outcome_of(new_world(Patient()).start(Say("", (call("flaky"),)), Say("done")))
    assert contents(outcome, "tool") == ["3"]


@pytest.mark.parametrize("concurrently", [1, 3])
async def test_a_limit_met_inside_a_tool_ends_the_rollout(
    new_world: type[RuntimeHarness], caplog: pytest.LogCaptureFixture, concurrently: int
) -> None:
    @tool
    async def delegate(run: Run) -> str:
        """Lets a subagent work for ever."""
        helper = await run.fork([{"role": "user", "content": "go on"}])
        while True:
            await helper.sample()
            await helper.append({"role": "user", "content": "go on"})

    @tool
    def delegate_in_thread(run: Run) -> str:
        """The same in a thread."""
        return run.wait(delegate.function(run))

    class Endless(Agent):
        name = "endless"
        tools = (delegate, delegate_in_thread)

    calls = tuple(call(("delegate", "delegate_in_thread")[n % 2], f"c{n}") for n in range(concurrently))
    outcome = await outcome_of(new_world(Endless()).start(Say("", calls), Say("more"), limits=Limits(turns=8)))
    assert outcome.end == Stop("max_turns")
    assert outcome.metrics.turns == 8
    assert "Traceback" not in caplog.text

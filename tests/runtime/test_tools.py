"""Tool calls run concurrently, their results keep the order of the calls, and every failure is a text for the model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_server import Agent, Limits, Run, ToolError, tool
from rollout_server.core.message import JSON, ToolCall, tool_calls
from rollout_server.core.record import ToolReturned, ToolStarted
from rollout_server.runtime.ports import Tool
from rollout_server.runtime.tools.executor import ToolExecutor

from tests.support.jumping_loop import JumpingLoop
from tests.support.runtime_harness import RuntimeHarness, Say, call, contents, outcome_of, wait


@tool
async def linger(seconds: float) -> float:
    """Returns later."""
    await wait(seconds)
    return seconds


@tool
async def refuse(text: str) -> str:
    """Raises a tool error."""
    raise ToolError(text)


@tool
async def crash(text: str) -> str:
    """Raises something else."""
    raise LookupError(text) if text else LookupError


@tool
async def now() -> str:
    """Has no parameters."""
    return "noon"


class Toolful(Agent):
    """An agent with the default loop and tools."""

    name = "toolful"
    tools = (linger, refuse, crash)


def lingering(*seconds: float) -> Say:
    return Say("wait", tuple(call("linger", f"c{index}", seconds=value) for index, value in enumerate(seconds)))


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_results_keep_the_order_of_the_calls_whatever_finishes_first(seconds: list[int]) -> None:
    async def play() -> None:
        rollout = RuntimeHarness(Toolful()).start(lingering(*seconds), Say("done"))
        outcome = await outcome_of(rollout)
        assert contents(outcome, "tool") == [repr(float(value)) for value in seconds]
        assert [m.fields()["tool_call_id"] for m in outcome.messages if m.role == "tool"] == [
            f"c{index}" for index in range(len(seconds))
        ]
        finished = [entry.record for entry in rollout.log.entries if isinstance(entry.record, ToolReturned)]
        assert [record.elapsed_ms for record in finished] == pytest.approx(sorted(1000.0 * value for value in seconds))
        assert outcome.metrics.tool_ms == pytest.approx(1000.0 * max(seconds))  # they ran concurrently
        assert outcome.metrics.total_ms == pytest.approx(1000.0 * max(seconds))

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(play())


async def test_all_calls_have_started_before_one_returns(new_world: type[RuntimeHarness]) -> None:
    rollout = new_world(Toolful()).start(lingering(0, 0, 0), Say("done"))
    await outcome_of(rollout)
    records = [entry.record for entry in rollout.log.entries if isinstance(entry.record, ToolStarted | ToolReturned)]
    assert [type(record) for record in records] == [ToolStarted] * 3 + [ToolReturned] * 3


async def test_the_result_of_an_early_call_is_in_the_log_before_the_late_one_returns(
    new_world: type[RuntimeHarness],
) -> None:
    rollout = new_world(Toolful()).start(lingering(1, 60), Say("done"))
    await asyncio.sleep(2)
    assert isinstance(rollout.log.entries[-1].record, ToolReturned)
    assert len(rollout.machine.messages) == 2  # the conversation receives the results together


async def test_of_the_calls_in_one_turn_the_first_run(new_world: type[RuntimeHarness]) -> None:
    rollout = new_world(Toolful()).start(lingering(3, 2, 1), Say("done"), limits=Limits(calls_per_turn=2))
    outcome = await outcome_of(rollout)
    assert contents(outcome, "tool") == ["3.0", "2.0", "Error: Too many tool calls in one turn; the first 2 ran"]
    assert (outcome.metrics.tool_calls, outcome.metrics.tool_failures) == (3, 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"seconds": 1', "Error: Invalid JSON arguments: "),
        ("", "Error: Invalid arguments for linger: seconds: missing"),
        ('{"seconds": NaN}', "Error: Invalid JSON arguments: NaN is not JSON"),
        ("[" * 100_000, "Error: Invalid JSON arguments: nested "),
        ("[" + "1," * 100_000 + "1]", "Error: Invalid JSON arguments: more than 100,000 values"),
        ('{"seconds": ' + "1" * 5000 + "}", "Error: Invalid JSON arguments: "),
        ("[1]", "Error: Invalid arguments for linger: a JSON object is needed, not list"),
        ('"1"', "Error: Invalid arguments for linger: a JSON object is needed, not str"),
        ('{"seconds": "1"}', 'Error: Invalid arguments for linger: seconds: must be a valid number, not "1"'),
        ("{}", "Error: Invalid arguments for linger: seconds: missing"),
        ({"seconds": 1}, "1.0"),
        ({"seconds": True}, "Error: Invalid arguments for linger: seconds: must be a valid number, not true"),
    ],
)
async def test_what_arguments_are_answered(
    new_world: type[RuntimeHarness], arguments: str | Mapping[str, JSON], said: str
) -> None:
    message = {
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "linger", "arguments": arguments}}],
    }
    outcome = await outcome_of(new_world(Toolful()).start(Say(message=json.dumps(message)), Say("done")))
    (content,) = contents(outcome, "tool")
    assert str(content).startswith(said)
    assert outcome.metrics.tool_failures == (said != "1.0")


@pytest.mark.parametrize("arguments", [{"arguments": each} for each in ("", " \n", "null", '""', None, "{}")] + [{}])
async def test_a_call_without_arguments_is_one_with_an_empty_object(arguments: dict[str, JSON]) -> None:
    function = {"name": "now", **arguments}
    (wanted,) = tool_calls({"tool_calls": [{"id": "c", "type": "function", "function": function}]})
    result = await ToolExecutor([now]).run(wanted)
    assert (result.text, result.failed) == ("noon", False)
    assert wanted.arguments == (arguments.get("arguments") or "")  # recorded as the model wrote it


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (call("add", a=1), "Error: Unknown function 'add'. Available: ['linger', 'refuse', 'crash']"),
        (call("refuse", text="closed today"), "Error: closed today"),
        (call("crash", text="no such row"), "Error: no such row"),
        (call("crash", text=""), "Error: LookupError"),
    ],
)
async def test_a_tool_that_fails_answers_the_model_and_the_rollout_goes_on(
    new_world: type[RuntimeHarness], wanted: ToolCall, said: str
) -> None:
    outcome = await outcome_of(new_world(Toolful()).start(Say("try", (wanted,)), Say("done")))
    assert contents(outcome, "tool") == [said]
    assert contents(outcome, "assistant") == ["try", "done"]
    assert outcome.metrics.tool_failures == 1


@tool
async def look_up(city: str) -> float:
    """Raises KeyError for an unknown city."""
    return {"Bern": 21.5}[city]


async def test_a_key_error_is_named_because_its_text_is_only_the_key() -> None:
    result = await ToolExecutor((look_up,)).run(call("look_up", city="Zürich"))
    assert result.content == "Error: KeyError: 'Zürich'"


@tool
async def search(places: list[str]) -> str:
    """Looks in all places at the same time."""

    async def look(place: str) -> None:
        if place == "cellar":
            raise ToolError("The cellar is locked")

    async with asyncio.TaskGroup() as group:
        for place in places:
            group.create_task(look(place))
    return "nothing"


@tool(retries=2, idempotent=True)
async def nested(places: list[str]) -> str:
    """Looks within a group of groups."""
    TRIED.append(places)
    raise ExceptionGroup("outer", [ExceptionGroup("inner", [ToolError("The cellar is locked")]), ValueError("late")])


TRIED: list[list[str]] = []


@pytest.mark.parametrize("function", [search, nested])
async def test_the_error_of_a_task_is_that_of_its_group(function: Tool) -> None:
    result = await ToolExecutor((function,)).run(call(function.name, places=["attic", "cellar"]))
    assert (result.content, result.failed) == ("Error: The cellar is locked", True)
    assert len(TRIED) == (function is nested)  # a ToolError is not retried


async def test_an_agent_without_tools_says_so() -> None:
    result = await ToolExecutor(()).run(call("add", a=1))
    assert result.content == "Error: Unknown function 'add'. Available: []"


async def test_play_reads_the_results(new_world: type[RuntimeHarness]) -> None:
    class Reading(Toolful):
        async def play(self, run: Run) -> None:
            results = await run.call((await run.sample()).tool_calls)
            run.note("read", " ".join(f"{result.call.id}={result.content}/{result.failed}" for result in results))

    rollout = new_world(Reading()).start(Say("", (call("linger", "x", seconds=0), call("refuse", "y", text="no"))))
    await outcome_of(rollout)
    assert rollout.log.entries[-2].record.text == "x=0.0/False y=Error: no/True"  # type: ignore[union-attr]


async def test_no_calls_are_no_turn_with_tools(new_world: type[RuntimeHarness]) -> None:
    class Calm(Toolful):
        async def play(self, run: Run) -> None:
            await run.sample()
            assert await run.call(()) == []
            await run.sample()

    outcome = await outcome_of(new_world(Calm()).start(limits=Limits(tool_turns=1)))
    assert (outcome.metrics.turns, outcome.metrics.tool_calls) == (2, 0)


@tool
async def write(text: str) -> str:
    """Returns the text."""
    return text


async def test_control_characters_in_arguments_arrive_as_they_were_written() -> None:
    text = "def f():\n\treturn 1\r\n\x00"
    result = await ToolExecutor([write]).run(ToolCall("c", "write", '{"text": "' + text + '"}'))
    assert (result.text, result.failed) == (text, False)

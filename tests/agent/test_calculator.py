"""The calculator: its tools as trainers receive them, its result texts, and its reward."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

import pytest
from rollout_server.calculator import Calculator
from rollout_server.core.message import JSON, ToolCall
from rollout_server.core.outcome import Stop
from rollout_server.runtime.agent_protocol import AgentProtocol
from rollout_server.runtime.tools.executor import ToolExecutor

from tests.support.golden import SYNC
from tests.support.jumping_loop import JumpingLoop
from tests.support.runtime_harness import RuntimeHarness, Say, call, contents, outcome_of

NUMBER = {"type": "number"}
TOOLS = {
    "add": ("Add two numbers", "First number", "Second number"),
    "subtract": ("Subtract two numbers", "First number", "Second number to subtract from first"),
    "multiply": ("Multiply two numbers", "First number", "Second number"),
    "divide": ("Divide two numbers", "Numerator", "Denominator (cannot be zero)"),
}


def told(agent: AgentProtocol) -> list[dict[str, JSON]]:
    """The tools as a trainer receives them."""
    return [
        {
            "type": "function",
            "function": {
                "name": each.name,
                "description": each.description,
                "parameters": json.loads(each.parameters_json_schema),
            },
        }
        for each in agent.tools
    ]


def test_the_tools_are_those_of_the_protocol_in_its_order() -> None:
    assert [each.name for each in Calculator().tools] == list(TOOLS)
    for each, (description, a, b) in zip(Calculator().tools, TOOLS.values(), strict=True):
        assert each.description == description
        assert each.parameters_json_schema == json.dumps(
            {
                "type": "object",
                "properties": {"a": {**NUMBER, "description": a}, "b": {**NUMBER, "description": b}},
                "required": ["a", "b"],
            }
        )


@pytest.mark.parametrize("delay", [0, 0.5])
def test_the_tools_are_those_that_were_recorded(delay: float) -> None:
    (exchange,) = json.loads((SYNC / "tools.json").read_text())["exchanges"]
    assert json.dumps(told(Calculator(delay))) == json.dumps(exchange["response"]["tools"])


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (call("add", a=5, b=3), "8"),
        (call("multiply", a=8, b=2), "16"),
        (call("divide", a=6, b=3), "2.0"),
        (call("divide", a=8, b=2), "4.0"),
        (call("divide", a=1, b=3), "0.3333333333333333"),
        (call("add", a=0.1, b=0.2), "0.30000000000000004"),
        (call("multiply", a=2.5, b=4), "10.0"),
        (call("subtract", a=3, b=10), "-7"),
        (call("multiply", a=10**12, b=10**12), "1000000000000000000000000"),
        (call("add", a=1e300, b=1), "1e+300"),
        (call("multiply", a=0.33333, b=0.33333), "0.11110888890000001"),
        (call("divide", a=1, b=0), "Error: Division by zero"),
        (call("divide", a=1, b=-0.0), "Error: Division by zero"),
        (call("divide", a=0, b=0.0), "Error: Division by zero"),
        (call("multiply", a=1e300, b=1e300), "Error: The result is too large"),
        (call("subtract", a=-1e308, b=1e308), "Error: The result is too large"),
        (call("add", a=10**400, b=0.5), "Error: The result is too large"),
        (call("divide", a=10**400, b=3), "Error: The result is too large"),
        (call("divide", a=1e-300, b=1e300), "0.0"),
        (call("multiply", a=10**4000, b=10**4000), "Error: The result of multiply cannot be written: too many digits"),
        (call("multiply", a=10**4000, b=0), "0"),
        (ToolCall("c", "add", '{"a": 1e999, "b": 1}'), "Error: Invalid arguments for add: a number is not finite, "),
        (ToolCall("c", "add", '{"a": ' + "9" * 4301 + ', "b": 1}'), "Error: Invalid JSON arguments: Exceeds the limit"),
        (call("add", a="5", b="3"), 'Error: Invalid arguments for add: a: must be a valid integer or a valid number, not "5"; '),
        (call("add", a=True, b=3), "Error: Invalid arguments for add: a: must be a valid integer or a valid number, not true"),
        (call("add", a=1), "Error: Invalid arguments for add: b: missing"),
        (call("add", a=1, b=2, c=3), "Error: Invalid arguments for add: c: unknown parameter"),
        (call("power", a=1, b=2), "Error: Unknown function 'power'. Available: ['add', 'subtract', 'multiply', 'divide']"),
        (ToolCall("c", "add", "{a: 5}"), "Error: Invalid JSON arguments: "),
        (ToolCall("c", "add", {"a": 5, "b": 3}), "8"),
    ],
    ids=lambda value: f"{value.name} {str(value.arguments)[:30]}" if isinstance(value, ToolCall) else value[:30],
)  # fmt: skip
async def test_what_a_call_is_answered(wanted: ToolCall, said: str) -> None:
    result = await ToolExecutor(Calculator().tools).run(wanted)
    assert result.content.startswith(said)
    assert result.failed == said.startswith("Error: ")
    if not said.endswith((" ", "limit")):
        assert result.content == said


def test_a_delayed_calculator_answers_the_same_later() -> None:
    async def play() -> None:
        calls = tuple(call("add", f"c{b}", a=5, b=b) for b in range(3))
        outcome = await outcome_of(RuntimeHarness(Calculator(delay=30)).start(Say("", calls), Say("done")))
        assert contents(outcome, "tool") == ["5", "6", "7"]
        assert outcome.metrics.tool_ms == pytest.approx(30_000)

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(play())


@pytest.mark.parametrize("delay", [-1, float("nan"), float("inf")])
def test_a_delay_that_is_none_is_refused(delay: float) -> None:
    with pytest.raises(ValueError, match="delay must be a finite number of seconds"):
        Calculator(delay)


async def rewarded(answer: str, metadata: Mapping[str, JSON], *before: Say) -> float | None:
    says = [*before, Say(message=json.dumps({"role": "assistant", "content": answer}))]
    outcome = await outcome_of(RuntimeHarness(Calculator()).start(*says, metadata_json=json.dumps(metadata)))
    assert outcome.end == Stop("stop")
    return outcome.reward_result.reward


@pytest.mark.parametrize(
    ("answer", "truth", "reward"),
    [
        ("5 plus 3 equals 8. Multiplying 8 by 2 gives 16.\n#### 16", "16", 1.0),
        ("#### 16", 16, 1.0),
        ("#### 16.0", "16", 1.0),
        ("#### 16", "16.0", 1.0),
        ("#### 16", 16.0, 1.0),
        ("#### 1.6e1", "16", 1.0),
        ("#### +16", "16", 1.0),
        ("#### 016", "16", 1.0),
        ("####16", "16", 1.0),
        ("####\t16 apples", "16", 1.0),
        ("#### 16.", "16", 1.0),
        ("#### **16**", "16", 1.0),
        ("#### $16,", "16", 1.0),
        ("#### 1,000", "1000", 1.0),
        ("#### 1,234,567.50", 1234567.5, 1.0),
        ("#### 1000", "1,000", 1.0),
        ("#### -7", "-7", 1.0),
        ("#### \N{MINUS SIGN}7", "-7", 1.0),
        ("#### .5", 0.5, 1.0),
        ("#### 0.1", 0.1, 1.0),
        ("#### 0.30000000000000004", 0.3, 0.0),
        ("#### 12345678901234567890.1", "12345678901234567890.2", 0.0),
        ("#### 15\nNo, wait.\n#### 16", "16", 1.0),
        ("#### 16\nNo, wait.\n#### 15", "16", 0.0),
        ("#### 16\n#### sixteen", "16", 0.0),
        ("#### 17", "16", 0.0),
        ("16", "16", 0.0),
        ("# 16\n### 16\n##### 16", "16", 0.0),
        ("####\n16", "16", 0.0),
        ("#### sixteen", "16", 0.0),
        ("#### 1,6", "16", 0.0),
        ("#### 16%", "16", 0.0),
        ("#### 1_6", "16", 0.0),
        ("#### \N{FULLWIDTH DIGIT ONE}\N{FULLWIDTH DIGIT SIX}", "16", 0.0),
        ("#### 1e999999999", "16", 0.0),
        ("#### 1e99999999999999999999", "16", 0.0),
        ("#### nan", "nan", None),
        ("", "16", 0.0),
        ("#### 16", " 16 ", 1.0),
        ("#### 16", "sixteen", None),
        ("#### 16", "", None),
        ("#### 1", True, None),
        ("#### 16", None, None),
        ("#### 16", [16], None),
        ("#### 16", {"value": 16}, None),
    ],
)
async def test_the_reward_compares_numbers(answer: str, truth: JSON, reward: float | None) -> None:
    assert await rewarded(answer, {"ground_truth": truth}) == reward


async def test_without_a_ground_truth_there_is_no_reward() -> None:
    assert await rewarded("#### 16", {}) is None


async def test_only_the_final_answer_counts() -> None:
    first = Say("#### 16", (call("add", a=5, b=3),))
    assert await rewarded("That was it.", {"ground_truth": 16}, first) == 0.0


async def test_the_text_parts_of_an_answer_count_together() -> None:
    parts = json.dumps(
        {"role": "assistant", "content": [{"type": "text", "text": "#### 1"}, {"type": "text", "text": "6"}]}
    )
    outcome = await outcome_of(
        RuntimeHarness(Calculator()).start(Say(message=parts), metadata_json='{"ground_truth": 16}')
    )
    assert outcome.reward_result.reward == 1.0


async def test_the_whole_calculation() -> None:
    rollout = RuntimeHarness(Calculator()).start(
        Say("I'll calculate that for you.", (call("add", "call_1", a=5, b=3),)),
        Say("Continuing the calculation.", (call("multiply", "call_2", a=8, b=2),)),
        Say("5 plus 3 equals 8. Multiplying 8 by 2 gives 16.\n#### 16"),
        metadata_json='{"ground_truth": "16"}',
    )
    outcome = await outcome_of(rollout)
    assert contents(outcome, "tool") == ["8", "16"]
    assert (outcome.end, outcome.reward_result.reward) == (Stop("stop"), 1.0)
    assert (outcome.metrics.turns, outcome.metrics.tool_calls, outcome.metrics.tool_failures) == (3, 2, 0)

"""Tools in processes see a read-only copy of their rollout, and what they cannot do is named."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from rollout_server import Agent, Run, ToolContext, tool
from rollout_server.core.message import ToolCall
from rollout_server.edge.tools.pool import ProcessPool
from rollout_server.runtime.tools.executor import ToolExecutor
from rollout_server.runtime.tools.process_context import MOST_BYTES
from rollout_server.runtime.tools.protocols import ToolFailed
from rollout_server.runtime.tools.resources import ToolResources

from tests.edge.tools import offered
from tests.support.runtime_harness import RuntimeHarness, Say, call, contents, outcome_of

STATE = {"basket": ["pear"], "price": 2.5, "open": None, "nested": {"a": [1]}}


@tool
async def set_state(name: str, context: ToolContext) -> str:
    """Puts something into the state that JSON cannot hold."""
    strange: dict[str, Any] = {
        "lock": threading.Lock(),
        "nan": [float("nan")],
        "cycle": context.state,
        "large": "x" * MOST_BYTES,
    }
    context.state[name] = strange[name]
    return "set"


class Shopping(Agent):
    """An agent whose state is set before the first turn."""

    name = "shopping"
    tools = (offered.report, offered.misuse, offered.without, set_state)

    async def play(self, run: Run) -> None:
        run.state.update(STATE, owner=run.rollout_id)
        await super().play(run)

    async def reward(self, run: Run) -> float:
        return float({**STATE, "owner": run.rollout_id} == run.state)


@pytest.fixture
async def world() -> AsyncIterator[RuntimeHarness]:
    resources = ToolResources(processes=ProcessPool())
    world = RuntimeHarness(Shopping(), tools=resources)
    yield world
    await world.close()
    await resources.close()


async def test_fifty_rollouts_at_once_each_send_their_own_state(world: RuntimeHarness) -> None:
    metadata = [json.dumps({"number": number}) for number in range(50)]
    rollouts = [world.start(Say("", (call("report"),)), Say("done"), metadata_json=text) for text in metadata]
    outcomes = await asyncio.gather(*map(outcome_of, rollouts))
    for number, (rollout, outcome) in enumerate(zip(rollouts, outcomes, strict=True)):
        (content,) = contents(outcome, "tool")
        own = rollout.spec.rollout_id
        assert json.loads(str(content)) == [rollout.uid, own, {"number": number}, {**STATE, "owner": own}, False]
        assert outcome.reward_result.reward == 1.0


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            "sample",
            "its process cannot use `sample` of the rollout, only uid, rollout_id, metadata, cancelled and a copy",
        ),
        ("logger", "its process cannot use `logger` of the rollout"),
        ("now", "its process cannot use `now` of the rollout"),
        ("state", "its process has a copy of the rollout's state and metadata, and changes to the copy would be lost"),
        ("inside", "its process has a copy of the rollout's state and metadata"),
        ("metadata", "its process has a copy of the rollout's state and metadata"),
    ],
)
async def test_what_a_process_cannot_do_is_named_with_the_authors_line(
    world: RuntimeHarness, caplog: pytest.LogCaptureFixture, how: str, says: str
) -> None:
    rollout = world.start(Say("", (call("misuse", how=how),)), Say("done"), metadata_json='{"wanted": {"a": 1}}')
    outcome = await outcome_of(rollout)
    (content,) = contents(outcome, "tool")
    assert str(content).startswith(f"Error: tool misuse: {says}")
    assert str(content).endswith("remove process=True")
    assert outcome.reward_result.reward == 1.0
    logged = f"tool misuse ({offered.misuse.definition}) ended with AgentMistake at {offered.__file__}:"
    assert logged in caplog.text


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lock", "state['lock']: Object of type lock is not JSON serializable; keep only JSON values in the state"),
        ("nan", "state['nan']: Out of range float values are not JSON compliant"),
        ("cycle", "state['cycle']: Circular reference detected"),
        ("large", "it has 1,048,"),
    ],
)
async def test_a_state_that_cannot_be_sent_fails_only_tools_that_take_it(
    world: RuntimeHarness, name: str, says: str
) -> None:
    calls = [
        Say("", (call(*of, **arguments),)) for of, arguments in ((("set_state",), {"name": name}), (("report",), {}))
    ]
    outcome = await outcome_of(world.start(*calls, Say("", (call("without", a=3),)), Say("done")))
    done, failed, other = contents(outcome, "tool")
    assert (done, other) == ("set", "3")
    assert str(failed).startswith(f"Error: tool report: its process cannot get a copy of the rollout's state: {says}")


async def test_arguments_are_checked_before_the_context(world: RuntimeHarness) -> None:
    outcome = await outcome_of(world.start(Say("", (call("report", context={}),)), Say("done")))
    assert contents(outcome, "tool") == ["Error: Invalid arguments for report: context: unknown parameter"]


async def test_without_a_rollout_there_is_no_context() -> None:
    result = await ToolExecutor((offered.report,)).run(ToolCall("c", "report", "{}"))
    assert result.text.startswith("Error: tool 'report': parameter context needs the rollout, and this call has none")
    with pytest.raises(TypeError, match="parameter context needs the rollout"):
        offered.report.run_here({})
    with pytest.raises(ToolFailed, match="needs its own process, which only a server starts"):
        await offered.without.run({"a": 3})

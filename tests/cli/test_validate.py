"""The command `rollout validate`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Invoke, complaint, document

AGENT = """
import pathlib
from rollout_server import Agent, Limits, Run, ToolError, tool

print("noise on standard output")

@tool
def touch(name: str) -> str:
    "Leaves a file behind."
    pathlib.Path("touched").write_text(name)
    return name * 2

@tool
def fails(name: str) -> str:
    "Always fails."
    raise ToolError("not today")

class A(Agent):
    name = "a"
    tools = (touch, fails)
"""
BARE = """
class Bare:
    name, description, parameters_json_schema = "bare", "", '{"type": "string"}'

    async def run(self, arguments):
        return ""

class B(Agent):
    name = "b"
    tools = (Bare(),)
    limits = Limits(turns=3)

    async def reward(self, run):
        return 1 / 0

class C(Agent):
    name = "c"

    async def play(self, run):
        run.messages
"""


def test_tools_run_only_when_that_is_asked_for(here: Path, invoke: Invoke) -> None:
    Path("agent.py").write_text(AGENT)
    told = invoke("validate", "agent.py", "--json")
    found = document(told)
    assert (found["valid"], found["agents"][0]["dry_run"]["end"]) == (True, "stop")
    assert "--call-tools" in found["next"]
    assert "noise on standard output" in told.stderr
    assert not Path("touched").exists()
    called = document(invoke("validate", "agent.py:A", "--call-tools", "--json"))["agents"][0]
    assert [(tool["name"], tool["called"]) for tool in called["tools"]] == [
        ("touch", "aa"),
        ("fails", "Error: not today"),
    ]
    assert Path("touched").read_text() == "a"


UNWRITABLE = """
from rollout_server import Agent, tool

@tool
def odd() -> object:
    "Odd."
    return object()

class A(Agent):
    name = "a"
    tools = (odd,)
"""


def test_a_tool_whose_result_cannot_be_written_is_not_valid(here: Path, invoke: Invoke) -> None:
    Path("agent.py").write_text(UNWRITABLE)
    (found,) = document(invoke("validate", "agent.py", "--call-tools", "--json"))["agents"]
    (error,) = found["tools"][0]["errors"]
    assert error.startswith("a call gave the model an error: The result of odd cannot be written: Unable to serialize")
    assert found["dry_run"]["end"] == "stop"


BROKEN = """
from rollout_server import Agent, tool


@tool
def add(a: int) -> int:
    "Add one to a number."
    return a + 1


class A(Agent):
    name = "a"
    tools = (add,)

    async def play(self, run):
        raise ValueError("not today")
"""


def test_a_call_that_the_agent_did_not_run_is_pointed_out(here: Path, invoke: Invoke) -> None:
    Path("agent.py").write_text(BROKEN)
    (found,) = document(invoke("validate", "agent.py", "--call-tools", "--json"))["agents"]
    (added,) = found["tools"]
    assert (added["errors"], added["called"]) == ([], None)
    assert "the agent did not run the mock model's call" in added["advice"]


EARLIER = """
from rollout_server import Agent, Run


class Earlier(Agent):
    name = "earlier"
    max_turns = 3
    rewards = ()

    async def run(self, ctx): ...
"""


def test_names_of_the_earlier_sdk_without_an_effect_are_pointed_out(here: Path, invoke: Invoke) -> None:
    Path("agent.py").write_text(EARLIER)
    told = invoke("validate", "agent.py", "--json")
    assert told.exit_code == 0
    (agent,) = document(told)["agents"]
    assert agent["advice"][:3] == [
        "the server does not use its run: the server calls play(self, run)",
        "the server does not use its max_turns: set limits = Limits(turns=...)",
        "the server does not use its rewards: define async def reward(self, run) or a rubric",
    ]


def test_what_is_wrong_and_what_would_be_better_is_told(here: Path, invoke: Invoke) -> None:
    Path("agent.py").write_text(AGENT + BARE)
    told = invoke("validate", "agent.py")
    assert told.exit_code == 1
    assert 'must have "type": "object"' in told.stdout
    assert "agent's reward failed" in told.stdout
    assert "ZeroDivisionError: division by zero" in told.stdout
    assert "agent.py:34" in told.stdout
    assert "it has no limits" in told.stdout
    assert "no description of name" in told.stdout
    assert told.stdout.rstrip().splitlines()[-1].startswith("next: fix")
    found = document(invoke("validate", "agent.py", "--json"))
    assert [(agent["name"], agent["valid"]) for agent in found["agents"]] == [("a", True), ("b", False), ("c", True)]
    silent = "it requested no completion: is the `await` of a run.sample() missing?"
    assert [silent in agent["advice"] for agent in found["agents"]] == [False, False, True]
    assert not found["valid"]


UNTIDY = """
from rollout_server import Agent, Limits

class Untidy(Agent):
    name = "untidy"
    limits = Limits(turns=3)

    async def reward(self, run):
        return 1.0

    async def cleanup(self, run):
        run.state["sandbox"].close()
"""


def test_a_cleanup_that_fails_is_an_error(here: Path, invoke: Invoke) -> None:
    Path("agent.py").write_text(UNTIDY)
    told = invoke("validate", "agent.py", "--json")
    [found] = document(told)["agents"]
    assert (told.exit_code, found["valid"], found["dry_run"]["reward"], found["dry_run"]["warnings"]) == (
        1,
        False,
        1.0,
        [],
    )
    (error,) = found["errors"]
    assert error.startswith("cleanup_failed: The agent's cleanup failed; ")
    assert "agent.py:12" in told.stderr


LOOP = """
from rollout_server.sdk import RolloutAgentLoop

class Loop(RolloutAgentLoop):
    name = "loop"

    def get_tools(self, request):
        return []

    async def run(self, ctx):
        return ctx.complete(list(ctx.request.messages))
"""


def test_a_loop_of_the_earlier_sdk_is_not_advised_what_it_has_no_place_for(here: Path, invoke: Invoke) -> None:
    Path("loop.py").write_text(LOOP)
    [found] = document(invoke("validate", "loop.py", "--json"))["agents"]
    assert (found["valid"], found["errors"], found["advice"]) == (True, [], [])


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_what_cannot_be_imported_is_told_in_either_form(here: Path, invoke: Invoke, flags: tuple[str, ...]) -> None:
    Path("agent.py").write_text("\n\nraise OSError('no luck')\n")
    told = invoke("validate", "agent.py", *flags)
    text = "agent.py:3: agent.py cannot be imported: OSError: no luck"
    if not flags:
        assert text in complaint(told)
        return
    wanted = {"command": "validate", "kind": "failed", "message": text, "file": "agent.py", "line": 3}
    assert (told.exit_code, document(told)) == (1, {"error": wanted})


RANKED = """
from rollout_server import Agent, Limits, Rubric


def ranking(runs: list) -> list[float]:
    return [1.0 for _ in runs]


class Ranked(Agent):
    name = "ranked"
    limits = Limits(turns=1)
    rubric = Rubric([ranking])
"""


def test_rewards_over_a_group_need_a_group(here: Path, invoke: Invoke) -> None:
    Path("ranked.py").write_text(RANKED)
    (agent,) = document(invoke("validate", "ranked.py", "--json"))["agents"]
    assert (agent["valid"], [text[:25] for text in agent["advice"]]) == (True, ["rewards over a group are "])


NEEDY = """
from rollout_server import Agent, Limits, Run
from rollout_server.testing.script import ScriptedReply

class Guest:
    def reply(self, messages):
        return ScriptedReply(content="Goodbye, " + messages[-1]["content"])

class Model:
    def reply(self, messages):
        return ScriptedReply(content="Hello")

MODELS = {"guest": Guest()}

class Needy(Agent):
    name = "needy"
    limits = Limits(turns=3)

    async def play(self, run: Run) -> None:
        await run.sample()
        said = await run.model("guest").sample([{"role": "user", "content": run.metadata["name"]}])
        run.state["said"] = said.content

    async def reward(self, run: Run) -> float:
        return float(run.state["said"] == "Goodbye, Ada")
"""


def test_a_dry_run_gets_metadata_and_further_models(here: Path, invoke: Invoke) -> None:
    Path("needy.py").write_text(NEEDY)
    told = invoke("validate", "needy.py", "--metadata", '{"name": "Ada"}', "--script", "needy.py:Model")
    assert told.exit_code == 0, told.output
    assert "reward 1" in told.stdout
    without = invoke("validate", "needy.py")
    assert without.exit_code == 1
    assert "--metadata JSON" in without.stdout.splitlines()[-1]
    both = invoke("validate", "needy.py", "--call-tools", "--script", "needy.py:Model")
    assert "exclude each other" in both.output

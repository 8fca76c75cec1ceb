"""Agents that own their loop: what their constructors accept, and what functions and programs are given."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from rollout_server import (
    CaptureOptions,
    ExternalAgent,
    FunctionAgent,
    Limits,
    Program,
    RewardResult,
    Rubric,
    own_loop,
    tool,
)
from rollout_server.agent.program import parsed_reward


@own_loop
async def plain(task, openai, http=None):
    """Does its work."""


@own_loop(name="other", limits=Limits(turns=3), capture=CaptureOptions(model="m"))
def with_options(run, *, access, metadata, model, anthropic, unused=1, **more):
    return 1.0


def test_a_function_is_an_agent() -> None:
    assert isinstance(plain, FunctionAgent)
    assert (plain.name, plain.description, plain.external, plain.replayable) == (
        "plain",
        "Does its work.",
        False,
        False,
    )
    assert (with_options.name, with_options.description, with_options.limits.turns) == ("other", "", 3)
    assert with_options.capture.model == "m"
    assert plain.function.__name__ == "plain"


def test_tools_are_an_option() -> None:
    """HTTP trainers learn them when a rollout begins."""

    @tool
    async def look(place: str) -> str:
        """Look."""
        return place

    assert ExternalAgent(name="far", tools=[look]).tools == (look,)


def test_a_function_with_unknown_parameters() -> None:
    async def solve(task, tasks):
        pass

    with pytest.raises(
        TypeError, match=r"solve: its parameter 'tasks' is none of openai, .* \(.*test_own_loop.py:\d+\)"
    ):
        own_loop(solve)

    def positional(task, /):
        pass

    with pytest.raises(TypeError, match="its parameter 'task'"):
        own_loop(positional)
    with pytest.raises(TypeError, match="agent class FunctionAgent: name"):
        own_loop(name=3)(plain.function)  # type: ignore[arg-type]


async def test_a_client_that_is_not_installed_keeps_the_server_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "anthropic", None)
    with pytest.raises(ModuleNotFoundError, match="needs it: pip install anthropic"):
        with_options.start()


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        (Program, {"command": []}, "command is empty"),
        (Program, {"command": "ls -l"}, "it must be a list of texts"),
        (Program, {"command": ["ls", 3]}, "it must be a list of texts"),
        (Program, {"command": ["ls"], "prefix": "nice"}, "prefix is 'nice'"),
        (Program, {"command": ["ls", "{tsk}"]}, r"\{tsk\} is not a placeholder; there are \{task\}, "),
        (Program, {"command": ["ls", "{key}"]}, r"\{key\} is not possible in arguments"),
        (Program, {"command": ["ls"], "environment": {"A": "{nothing}"}}, "is not a placeholder"),
        (Program, {"command": ["ls"], "environment": {"A": 1}}, "environment must be a dictionary with texts"),
        (Program, {"command": ["ls"], "environment": ["A=1"]}, "environment must be a dictionary with texts"),
        (Program, {"command": ["ls"], "exit_codes": 0}, "exit_codes is 0; it must be a collection of numbers"),
        (Program, {"command": ["ls"], "exit_codes": ("1",)}, "it must be a collection of numbers"),
        (Program, {"command": ["ls"], "reward_file": "/tmp/reward"}, "it must be in the working directory"),
        (Program, {"command": ["ls"], "reward_file": "../reward"}, "it must be in the working directory"),
        (Program, {"command": ["ls"], "stdin": b"x"}, "stdin and reward_file must be texts"),
        (Program, {"command": ["ls"], "template": "/no/such"}, "'/no/such', which is not a directory"),
        (Program, {"command": ["ls"], "workdir": "/tmp"}, "Program has no option 'workdir'"),
        (Program, {"command": ["ls"], "play": print}, "Program has no option 'play'"),
        (Program, {"command": ["ls"], "capture": None}, "it must be CaptureOptions"),
        (ExternalAgent, {"idle_seconds": 0}, "idle_seconds is 0"),
        (ExternalAgent, {"idle_seconds": math.inf}, "idle_seconds is inf"),
        (ExternalAgent, {"idle_seconds": True}, "idle_seconds is True"),
        (ExternalAgent, {"rubrics": Rubric()}, "ExternalAgent has no option 'rubrics'"),
        (ExternalAgent, {"_set": 1}, "has no option '_set'"),
    ],
)
def test_wrong_options(kind: Any, options: dict[str, Any], reason: str) -> None:
    with pytest.raises((TypeError, ValueError), match=reason):
        kind(**{"name": "a", **options})


def test_no_name() -> None:
    with pytest.raises(TypeError, match="agent class Program: name is missing"):
        Program(["ls"])


class Fixed(Program):
    """Its docstring describes it."""

    name = "fixed"
    command = ("echo", '{"a": 1}', "${task}", "{}", "{task}")


class Careless(Program):
    name = "careless"
    command = ("ls", "{nothing}")

    def __init__(self) -> None:
        """Does not call the constructor of its base class."""


def test_programs_as_classes() -> None:
    assert (Fixed().description, Program(["ls"], name="ls").description) == ("Its docstring describes it.", "")
    assert (Fixed(limits=Limits(turns=2)).limits.turns, Fixed(["true"]).command) == (2, ["true"])
    assert (Fixed().overrides("setup"), Fixed().overrides("cleanup"), Fixed().overrides("reward_group")) == (
        True,
        True,
        False,
    )
    with pytest.raises(ValueError, match="is not a placeholder"):
        Careless()


def test_external_agents() -> None:
    agent = ExternalAgent(name="far", idle_seconds=1.5)
    assert (agent.external, agent.idle_seconds, Fixed().external) == (True, 1.5, False)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, RewardResult(1.0)),
        ({"reward": 0.5, "scores": {"a": 1}, "extra": {"b": [2]}}, RewardResult(0.5, {"a": 1.0}, '{"b": [2]}')),
        ({"reward": True}, RewardResult(1.0)),
        ({"scores": {}}, RewardResult(None, {})),
        (None, RewardResult()),
    ],
)
def test_rewards_of_a_file(value: object, expected: RewardResult) -> None:
    assert parsed_reward(value) == expected


@pytest.mark.parametrize("value", ["1", [1], {"rewards": 1}, {"reward": "1"}, {"scores": [1]}, {"extra": 3}])
def test_wrong_rewards_of_a_file(value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        parsed_reward(value)


def test_a_wrong_reward_of_a_file_is_named() -> None:
    with pytest.raises(TypeError, match=r"^the reward is 'x'; it must be a number$"):
        parsed_reward({"reward": "x"})


def test_a_template_is_a_directory(tmp_path: Path) -> None:
    assert Program(["ls"], name="ls", template=tmp_path).template == tmp_path

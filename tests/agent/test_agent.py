"""Agent classes: valid attributes, errors and when they are raised, and how rewards are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from rollout_server import Agent, Limits, Run, tool
from rollout_server.core.message import JSON
from rollout_server.runtime.agent_protocol import AgentProtocol
from rollout_server.runtime.ports import Tool


@tool
async def add(a: int, b: int) -> int:
    """Add two numbers"""
    return a + b


def subtract(a: int, b: int) -> int:
    """Subtract two numbers"""
    return a - b


class Remote:
    """A tool that is not a function."""

    name = "remote"
    description = "Elsewhere"
    parameters_json_schema = '{"type": "object", "properties": {}, "required": []}'

    async def run(self, arguments: Mapping[str, JSON]) -> str:
        return "far away"


class Plain(Agent):
    """Plays the default loop.

    Twice indented.
    """

    name = "plain"


def test_what_a_class_leaves_out_is_filled_in() -> None:
    agent: AgentProtocol = Plain()
    assert (agent.name, agent.version, agent.tools, agent.limits) == ("plain", "1", (), Limits())
    assert agent.description == "Plays the default loop.\n\nTwice indented."
    assert agent.replayable


def test_what_a_class_says_is_taken() -> None:
    class Full(Agent):
        """Not this."""

        name = "full"
        version = "2024-05"
        description = "This"
        tools = [add, Remote()]  # noqa: RUF012 - authors write lists, too
        limits = Limits(turns=3)
        replayable = False

    agent = Full()
    assert (agent.version, agent.description, agent.limits, agent.replayable) == (
        "2024-05",
        "This",
        Limits(turns=3),
        False,
    )
    assert [each.name for each in agent.tools] == ["add", "remote"]
    assert isinstance(Full.tools, tuple)


def test_a_description_is_inherited_where_a_class_has_no_docstring() -> None:
    class Child(Plain):
        name = "child"

    class Bare(Agent):
        name = "bare"

    assert Child().description == Plain.description
    assert Bare().description == ""


async def test_plain_functions_become_tools() -> None:
    class Mixed(Agent):
        name = "mixed"
        tools: Any = (add, subtract, Remote())

    first, second, third = Mixed().tools
    assert first is add
    assert (second.name, second.description) == ("subtract", "Subtract two numbers")
    assert await second.run({"a": 5, "b": 3}) == "2"
    assert await third.run({}) == "far away"


def test_tools_and_name_may_be_set_on_the_object() -> None:
    class Own(Agent):
        def __init__(self, name: str, *tools: Callable[..., object]) -> None:
            self.name = name
            self.tools = [*tools]  # type: ignore[list-item]

    assert [each.name for each in Own("own", add, subtract).tools] == ["add", "subtract"]
    with pytest.raises(ValueError, match="'add'"):
        Own("own", add, add)
    with pytest.raises(ValueError, match="name must not be blank"):
        Own(" ")


def test_a_dataclass_and_an_abstract_class_may_be_agents() -> None:
    @dataclass(frozen=True)
    class Frozen(Agent):
        """Frozen."""

        name: str = "frozen"
        tools: Any = (subtract,)

    class Base(Agent, ABC):
        name = "base"

        @abstractmethod
        def prompt(self) -> str: ...

    assert [each.name for each in Frozen().tools] == ["subtract"]
    assert Frozen(name="other").name == "other"
    with pytest.raises(TypeError, match="abstract"):
        Base()  # type: ignore[abstract]


async def own_play(self: Agent, run: Run) -> None: ...


@pytest.mark.parametrize(
    ("bases", "members", "replayable"),
    [
        ((Agent,), {}, True),
        ((Agent,), {"play": own_play}, False),
        ((Agent,), {"play": own_play, "replayable": True}, True),
        ((Agent,), {"setup": own_play}, False),
        ((Agent,), {"cleanup": own_play}, True),
        ((Agent,), {"replayable": False}, False),
        ((type("Mixin", (), {"play": own_play}), Agent), {}, False),
    ],
)
def test_only_the_default_loop_is_replayable_unless_a_class_says_so(
    bases: tuple[type, ...], members: dict[str, Any], replayable: bool
) -> None:
    assert type("Some", bases, {"name": "some", **members})().replayable is replayable


def test_what_a_class_says_of_its_play_holds_for_that_play() -> None:
    class Sure(Agent):
        name = "sure"
        replayable = True
        play = own_play

    class Same(Sure):
        name = "same"

    class Another(Sure):
        name = "another"
        play = own_play

    assert Same().replayable
    assert not Another().replayable


async def _yields(self: Agent, run: Run) -> AsyncIterator[float]:
    yield 1.0


async def _waits(self: Agent, request: object) -> tuple[Tool, ...]:
    return ()


@pytest.mark.parametrize(
    ("members", "error", "says"),
    [
        ({"name": ""}, ValueError, "name must not be blank"),
        ({"name": " \n"}, ValueError, "name must not be blank"),
        ({"name": "x" * 257}, ValueError, "name has 257 characters; at most 256"),
        ({"name": None}, TypeError, "name is missing; it must be a str"),
        ({"name": 7}, TypeError, "name is 7; it must be a str"),
        ({"version": 2}, TypeError, "version is 2; it must be a str"),
        ({"version": ""}, ValueError, "version must not be blank"),
        ({"description": 1}, TypeError, "description is 1"),
        ({"limits": {"turns": 3}}, TypeError, "limits is {'turns': 3}; it must be a Limits"),
        ({"limits": Limits(turns=0, bytes=5, seconds=-1.0)}, ValueError, "not turns=0, seconds=-1.0"),
        ({"limits": Limits(seconds=float("nan"))}, ValueError, "seconds=nan"),
        ({"cleanup_seconds": 0}, ValueError, "cleanup_seconds is 0; it must be a number above 0, at most"),
        ({"cleanup_seconds": None}, ValueError, "cleanup_seconds is None; it must be a number above 0"),
        ({"cleanup_seconds": float("inf")}, ValueError, "cleanup_seconds is inf"),
        ({"replayable": "yes"}, TypeError, "replayable is 'yes'; it must be a bool"),
        ({"tools": add}, TypeError, "tools must be a list or tuple of tools"),
        ({"tools": "add"}, TypeError, "tools must be a list or tuple of tools, not 'add'"),
        ({"tools": {add}}, TypeError, "tools must be a list or tuple of tools"),
        ({"tools": (add, 7)}, TypeError, "7 is neither a tool nor a function"),
        ({"tools": (Remote,)}, TypeError, "Remote'> is neither a tool nor a function"),
        ({"tools": (print,)}, TypeError, "print> is neither a tool nor a function"),
        (
            {"tools": (type("Sync", (Remote,), {"run": lambda self, arguments: ""})(),)},
            TypeError,
            "tool 'remote' has no `async def run`",
        ),
        ({"tools": (lambda: 1,)}, TypeError, "tool '<lambda>'"),
        ({"tools": (add, subtract, add)}, ValueError, "more than one tool has the name 'add'"),
        ({"play": None}, TypeError, "play must be a method, it is None"),
        ({"setup": lambda self: None}, TypeError, "setup is called with (self, run): too many positional arguments ("),
        ({"cleanup": _yields}, TypeError, "cleanup must not be a generator: it contains `yield`; return the result ("),
        ({"reward": _yields}, TypeError, "reward must not be a generator: it contains `yield`; return the result ("),
        (
            {"choose_tools": _waits},
            TypeError,
            "choose_tools must be a plain `def`: the server calls it while it accepts the request (",
        ),
    ],
)
def test_a_wrong_class_is_refused_where_it_is_defined(
    members: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as refused:
        type("Wrong", (Agent,), {"name": "wrong", **members})
    assert str(refused.value).startswith("agent class Wrong: ")
    assert says in str(refused.value)


def test_names_of_256_characters_are_allowed() -> None:
    assert type("Long", (Agent,), {"name": "x" * 256})().name == "x" * 256


def test_a_name_may_be_missing_until_an_object_is_made() -> None:
    class Base(Agent): ...

    class Named(Base):
        name = "named"

        def __init__(self) -> None: ...

    assert Named().name == "named"
    with pytest.raises(TypeError, match="agent class Base: name is missing"):
        Base()


def test_tools_of_an_agent_are_what_the_runtime_wants() -> None:
    tools: tuple[Tool, ...] = (add, Remote())
    assert type("Some", (Agent,), {"name": "some", "tools": tools})().tools is tools

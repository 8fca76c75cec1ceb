"""Mistakes in an agent's definition are reported with their line before a server listens."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field
from rollout_server import Agent, Limits, Run, tool
from rollout_server.app import Server
from rollout_server.authoring.author_traceback import author_error
from rollout_server.runtime.run.lifecycle import AgentFailed

from tests.support.start_requests import settings


class Shelf(BaseModel):
    """A model whose validation and serialization aliases differ."""

    number: int = Field(validation_alias="shelf")


def without_a_name() -> None:
    class Nameless(Agent):
        pass

    Nameless()


def blank_name() -> None:
    class Blank(Agent):
        name = " "


def name_of_another_type() -> None:
    class Numbered(Agent):
        name = 7  # type: ignore[assignment]


def endless_name() -> None:
    class Long(Agent):
        name = "x" * 257


def limit_of_nothing() -> None:
    class Limited(Agent):
        name = "limited"
        limits = Limits(turns=0)


def play_with_a_yield() -> None:
    class Yielding(Agent):
        name = "yielding"

        async def play(self, run: Run) -> Any:
            yield await run.sample()


def choice_that_waits() -> None:
    class Waiting(Agent):
        name = "waiting"

        async def choose_tools(self, request: object) -> Sequence[Any]:  # type: ignore[override]
            return ()


def reward_that_is_none() -> None:
    class Rewarded(Agent):
        name = "rewarded"
        reward = 1.0  # type: ignore[assignment]


def one_tool_for_many() -> None:
    class Single(Agent):
        name = "single"
        tools = untyped  # type: ignore[assignment]


def no_tool_at_all() -> None:
    class Odd(Agent):
        name = "odd"
        tools = (object(),)  # type: ignore[assignment]


def untyped(a, b):  # type: ignore[no-untyped-def]
    """Adds."""
    return a + b


def parameter_without_a_type() -> None:
    tool(untyped)


def any_number_of_parameters() -> None:
    @tool
    def add(*numbers: int) -> int:
        return sum(numbers)


def unknown_type() -> None:
    @tool
    def paint(colour: Colour) -> None:  # type: ignore[name-defined]  # noqa: F821
        """Paints."""


def policy_that_makes_no_sense() -> None:
    @tool(retries=2)
    def book(flight: str) -> None:
        """Books."""


def word_that_is_in_no_policy() -> None:
    @tool(timout=2)  # type: ignore[call-overload, untyped-decorator]
    def book(flight: str) -> None:
        """Books."""


def process_for_a_closure() -> None:
    @tool(process=True)
    def inner() -> None:
        """Runs where nobody finds it."""


def made_of_no_function() -> None:
    tool(7)  # type: ignore[call-overload]


def limit_in_words() -> None:
    class Limited(Agent):
        name = "limited"
        limits = Limits(turns="8")  # type: ignore[arg-type]


def reward_that_takes_no_run() -> None:
    class Rewarded(Agent):
        name = "rewarded"

        async def reward(self) -> float:  # type: ignore[override]
            return 1.0


def start_that_wants_more() -> None:
    class Started(Agent):
        name = "started"

        async def start(self, server: object) -> None:  # type: ignore[override]
            """A hook with a parameter that is never passed."""


def half_of_a_letter() -> None:
    @tool
    def look() -> None:
        """Looks at \ud800."""


def tool_with_a_yield() -> None:
    @tool
    async def count() -> Any:
        yield 1


def tool_of_no_object() -> None:
    class Shop(Agent):
        name = "shop"

        @tool
        def price(self, of: str) -> int:
            return len(of)


def default_of_another_type() -> None:
    @tool
    def look(places: list[int], depth: Literal[1, 2] = 3) -> None:  # type: ignore[assignment]
        """Looks."""


def default_that_is_no_json() -> None:
    @tool
    def look(depth: float = math.nan) -> None:
        """Looks."""


def what_no_model_can_write() -> None:
    @tool
    def look(place: str, runs: list[Run]) -> None:
        """Looks."""


def cached_for_all_rollouts() -> None:
    @tool(idempotent=True, cache=True)
    def look(place: str, run: Run) -> None:
        """Looks."""


def what_is_read_unchecked() -> None:
    @tool
    def add(numbers: Iterable[int]) -> int:
        return sum(numbers)


def pattern_that_looks_ahead() -> None:
    @tool
    def look(place: Annotated[str, Field(pattern="^(?=a)[a-z]+$")]) -> None:
        """Looks."""


def class_for_an_argument() -> None:
    @tool
    def look(kind: type[int]) -> None:
        """Looks."""


class Corner(Enum):
    LEFT = (0, 0)


def choice_that_is_no_json() -> None:
    @tool
    def look(place: Corner) -> None:
        """Looks."""


def policy_of_a_tool() -> None:
    @tool
    def look() -> None:
        """Looks."""

    tool(look, timeout=3)  # type: ignore[call-overload]


WRONG = [
    (without_a_name, "agent class Nameless: name is missing"),
    (blank_name, "agent class Blank: name must not be blank"),
    (name_of_another_type, "agent class Numbered: name is 7; it must be a str"),
    (endless_name, "agent class Long: name has 257 characters; at most 256 are allowed"),
    (limit_of_nothing, "agent class Limited: limits must be positive or None, not turns=0"),
    (play_with_a_yield, "agent class Yielding: play must not be a generator: it contains `yield`"),
    (choice_that_waits, "choose_tools must be a plain `def`"),
    (reward_that_is_none, "agent class Rewarded: reward must be a method, it is 1.0"),
    (one_tool_for_many, "tools must be a list or tuple of tools"),
    (no_tool_at_all, "is neither a tool nor a function"),
    (parameter_without_a_type, "tool 'untyped': parameter a needs a type annotation"),
    (any_number_of_parameters, "tool 'add': parameter *numbers: 'int' cannot be passed by name"),
    (unknown_type, "tool 'paint': name 'Colour' is not defined: annotations are evaluated at module level"),
    (policy_that_makes_no_sense, "retries need a tool that may be called again"),
    (word_that_is_in_no_policy, "@tool takes no 'timout'; it takes timeout"),
    (process_for_a_closure, "tool 'inner': a process imports its tool by name"),
    (made_of_no_function, "@tool needs a function or a method, not 7"),
    (limit_in_words, "agent class Limited: limits must be positive or None, not turns='8'; seconds may be any number"),
    (
        reward_that_takes_no_run,
        "agent class Rewarded: reward is called with (self, run): too many positional arguments",
    ),
    (start_that_wants_more, "agent class Started: start is called with (self): missing a required argument: 'server'"),
    (half_of_a_letter, "tool 'look': 'utf-8' codec can't encode"),
    (tool_with_a_yield, "tool 'count' must not be a generator: it contains `yield`"),
    (tool_of_no_object, "tool 'price': it is a method, and there is no object yet; make it in __init__"),
    (default_of_another_type, "tool 'look': the default of parameter depth: must be 1 or 2, not 3"),
    (default_that_is_no_json, "tool 'look': the default of parameter depth: "),
    (
        what_no_model_can_write,
        "tool 'look': parameter runs: list[rollout_server.runtime.run.run.Run] has no JSON Schema",
    ),
    (cached_for_all_rollouts, "tool 'look': cache shares results between rollouts, and parameter run differs"),
    (what_is_read_unchecked, "tool 'add': parameter numbers: the items of an Iterable are not validated"),
    (pattern_that_looks_ahead, "tool 'look': parameter place: its type cannot be validated: look-around, including"),
    (class_for_an_argument, "tool 'look': parameter kind: a class cannot be written in JSON"),
    (choice_that_is_no_json, "tool 'look': parameter place: the value of Corner.LEFT cannot be written in JSON"),
    (policy_of_a_tool, "tool 'look' is already a tool; set its policy where it is defined"),
]


@pytest.mark.parametrize(("define", "says"), WRONG, ids=lambda value: getattr(value, "__name__", ""))
def test_it_is_told_at_its_own_line(define: Callable[[], None], says: str) -> None:
    """`rollout serve` and `rollout validate` name a line inside the faulty definition."""
    with pytest.raises((TypeError, ValueError)) as caught:
        define()
    mistake = author_error(caught.value, "agent.py")
    assert says in str(mistake)
    assert mistake.file.endswith("tests/authoring/test_definitions.py")
    wrong = untyped if define is parameter_without_a_type else define
    lines, first = inspect.getsourcelines(wrong)
    assert first <= mistake.line < first + len(lines)


def test_two_tools_of_one_name_are_told_with_both_places() -> None:
    @tool
    def add(a: int) -> int:
        return a

    def another() -> Any:
        @tool
        def add(a: str) -> str:
            return a

        return add

    other = another()
    with pytest.raises(ValueError, match="more than one tool has the name 'add': ") as caught:

        class Doubled(Agent):
            name = "doubled"
            tools = (add, other)

    assert str(caught.value).endswith(f": {add.definition}; {other.definition}")
    assert add.definition.line != other.definition.line


async def test_what_is_no_agent_is_not_served() -> None:
    for agents, says in (
        ([], "there is no agent to serve"),
        ([First], "serve an instance, First()"),
        ([7], "7 is not an agent"),
    ):
        with pytest.raises(AgentFailed) as caught:
            async with Server(agents, settings()):  # type: ignore[arg-type]
                pytest.fail("it started")
        assert str(caught.value).endswith(says)


def test_a_default_that_is_written_otherwise_than_it_is_read_is_not_told() -> None:
    @tool
    def look(at: Shelf = Shelf(shelf=3), depth: int = None, width: int = 2) -> int:  # type: ignore[assignment]  # noqa: B008, RUF013
        return at.number + width

    told = json.loads(look.parameters_json_schema)["properties"]
    assert [name for name, shape in told.items() if "default" in shape] == ["width"]
    assert look.run_here({}) == "5"


def with_a_judge(reward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reward)
    async def judged(self: Agent, run: Run) -> Any:
        return await reward(self, run, judge=str)

    return judged


def test_a_method_is_called_as_its_decorator_wants() -> None:
    class Judged(Agent):
        name = "judged"

        @with_a_judge
        async def reward(self, run: Run, judge: Callable[[object], str]) -> float:
            return float(judge(run.turn))

        @staticmethod
        def start() -> None:
            """A hook without `self`."""

    assert inspect.iscoroutinefunction(Judged().reward)


class First(Agent):
    """One of two agents in a module."""

    name = "same"


class Second(Agent):
    """The other agent in the module."""

    name = "same"


async def test_two_agents_of_one_name_are_told_with_both_places() -> None:
    with pytest.raises(ValueError, match="two agents have the name 'same'") as caught:
        async with Server([First(), Second()], settings()):
            pytest.fail("it started")
    for kind in (First, Second):
        line = inspect.getsourcelines(kind)[1]
        assert f"{__file__}:{line}" in str(caught.value)
    await asyncio.sleep(0)

"""Tools made of functions: what the model is told, what it may send, and what it reads."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, Union

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from rollout_server import ToolError, tool
from rollout_server.core.message import JSON
from rollout_server.runtime.port import ArgumentError, Tool

Number = int | float


class Colour(Enum):
    """What paint has."""

    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1


class Point(BaseModel):
    """A place."""

    title: str
    x: Annotated[Number, Field(description="To the right", ge=0)]
    at: date | None = None


class Node(BaseModel):
    """Contains itself."""

    inner: list[Node] = []


@dataclass
class Size:
    width: int


def schema_of(function: Callable[..., object]) -> Any:
    return json.loads(tool(function).parameters_json_schema)


def properties_of(function: Callable[..., object]) -> Any:
    return schema_of(function)["properties"]


def test_a_tool_has_the_name_and_docstring_of_its_function() -> None:
    @tool
    async def add(a: Number, b: Number) -> Number:
        """Add two numbers.

        All of them.
        """
        return a + b

    port: Tool = add
    assert (port.name, port.description) == ("add", "Add two numbers.\n\nAll of them.")


def test_the_schema_has_the_shape_of_function_tools_key_by_key() -> None:
    async def add(
        a: Annotated[Number, "First number"], b: Annotated[Number, Field(description="Second number")]
    ) -> Number:
        return a + b

    assert tool(add).parameters_json_schema == json.dumps(
        {
            "type": "object",
            "properties": {
                "a": {"type": "number", "description": "First number"},
                "b": {"type": "number", "description": "Second number"},
            },
            "required": ["a", "b"],
        }
    )


def test_a_tool_without_parameters_has_all_keys() -> None:
    def nothing() -> None:
        """Does nothing"""

    assert schema_of(nothing) == {"type": "object", "properties": {}, "required": []}


def test_what_annotations_become() -> None:
    def f(  # noqa: PLR0917
        integer: int,
        number: Union[float, int],  # noqa: UP007 - authors write it, too
        flag: bool,
        texts: list[str],
        colour: Annotated[Colour, "Of the paint"],
        one: Literal["a"],
        several: Literal["a", "b"],
        nullable: int | None,
        either: str | int | float | None,
        counts: dict[str, int],
        anything: dict[str, Any],
        bounded: Annotated[Number, Field(ge=1, lt=9)],
        when: date,
    ) -> None: ...

    assert properties_of(f) == {
        "integer": {"type": "integer"},
        "number": {"type": "number"},
        "flag": {"type": "boolean"},
        "texts": {"type": "array", "items": {"type": "string"}},
        "colour": {"type": "string", "description": "Of the paint", "enum": ["red", "blue"]},
        "one": {"type": "string", "enum": ["a"]},
        "several": {"type": "string", "enum": ["a", "b"]},
        "nullable": {"type": "integer"},
        "either": {"anyOf": [{"type": "string"}, {"type": "number"}]},
        "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
        "anything": {"type": "object"},
        "bounded": {"type": "number", "minimum": 1, "exclusiveMaximum": 9},
        "when": {"type": "string", "format": "date"},
    }
    assert schema_of(f)["required"] == list(properties_of(f))


def test_defaults_make_parameters_optional() -> None:
    def f(
        a: int, b: int = 2, c: int | None = None, d: int = Field(4, description="Fourth"), *, e: str = "x"
    ) -> None: ...

    assert schema_of(f) == {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "integer", "default": 2},
            "c": {"type": "integer"},
            "d": {"type": "integer", "description": "Fourth", "default": 4},
            "e": {"type": "string", "default": "x"},
        },
        "required": ["a"],
    }


def test_models_are_written_in_place() -> None:
    def f(
        point: Point, points: Annotated[list[Point], "Several"], size: Annotated[Size | None, "How large"] = None
    ) -> None: ...

    point = {
        "type": "object",
        "description": "A place.",
        "properties": {
            "title": {"type": "string"},
            "x": {"type": "number", "description": "To the right", "minimum": 0},
            "at": {"type": "string", "format": "date"},
        },
        "required": ["title", "x"],
    }
    size = {
        "type": "object",
        "description": "How large",
        "properties": {"width": {"type": "integer"}},
        "required": ["width"],
    }
    assert properties_of(f) == {
        "point": point,
        "points": {"type": "array", "description": "Several", "items": point},
        "size": size,
    }
    assert list(properties_of(f)["point"]) == ["type", "description", "properties", "required"]


def test_names_that_are_words_of_schemas_or_of_pydantic_are_names_like_others() -> None:
    def f(title: str, schema: str, json: str, model_config: str, default: str, type: str) -> str:
        return title + schema + json + model_config + default + type

    assert list(properties_of(f)) == ["title", "schema", "json", "model_config", "default", "type"]
    arguments = dict.fromkeys(properties_of(f), "x")
    assert asyncio.run(tool(f).run(arguments)) == "xxxxxx"


def positional(a: int, /) -> None: ...
def starred(*a: int) -> None: ...
def double_starred(**a: int) -> None: ...
def untyped(a) -> None: ...  # type: ignore[no-untyped-def]
def unknown(a: NoSuchType) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def recursive(a: Node) -> None: ...
def unserialisable(a: threading.Lock) -> None: ...
def ünüsual() -> None: ...  # noqa: PLC2401 - what is refused
def a_name_of_more_than_sixty_four_characters_which_no_trainer_has_to_accept() -> None: ...


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (positional, "tool 'positional': parameter a: 'int' cannot be given by name"),
        (starred, "tool 'starred': parameter *a"),
        (double_starred, "tool 'double_starred': parameter **a"),
        (untyped, "tool 'untyped': parameter a needs a type"),
        (unknown, "tool 'unknown': name 'NoSuchType' is not defined"),
        (recursive, "tool 'recursive': the type Node contains itself"),
        (unserialisable, "tool 'unserialisable': "),
        (ünüsual, "tool 'ünüsual': a name has 1 to 64 letters"),
        (a_name_of_more_than_sixty_four_characters_which_no_trainer_has_to_accept, "1 to 64"),
        (lambda: None, "tool '<lambda>'"),
        (functools.partial(starred), "a tool is made of a function"),
        (Point, "a tool is made of a function"),
        (print, "a tool is made of a function"),
        (7, "a tool is made of a function, not of 7"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_by_name(function: Callable[..., object], says: str) -> None:
    with pytest.raises(TypeError) as refused:
        tool(function)
    assert says in str(refused.value)


def test_a_tool_is_its_own_tool_and_its_function_stays_callable() -> None:
    @tool
    def double(a: int) -> int:
        return 2 * a

    assert tool(double) is double
    assert double(4) == 8


def test_a_method_is_a_tool_of_its_object() -> None:
    class Shop:
        def __init__(self, prices: Mapping[str, int]) -> None:
            self.prices = prices

        async def price(self, of: Annotated[str, "What to buy"]) -> int:
            """Look up a price"""
            return self.prices[of]

    price = tool(Shop({"tea": 3}).price)
    assert json.loads(price.parameters_json_schema)["required"] == ["of"]
    assert asyncio.run(price.run({"of": "tea"})) == "3"


def kind(value: object) -> str:
    return f"{type(value).__name__} {value}"


@tool
async def numbers(a: Number, b: float = 0.0, c: int = 0) -> str:
    """Says what it was given"""
    return f"{kind(a)}, {kind(b)}, {kind(c)}"


@pytest.mark.parametrize(
    ("arguments", "content"),
    [
        ({"a": 5}, "int 5, float 0.0, int 0"),
        ({"a": 5.0, "b": 2, "c": 3}, "float 5.0, float 2.0, int 3"),
        ({"a": 10**30}, f"int {10**30}, float 0.0, int 0"),
        ({"a": -1e300}, "float -1e+300, float 0.0, int 0"),
    ],
)
async def test_numbers_arrive_as_they_were_sent(arguments: Mapping[str, JSON], content: str) -> None:
    assert await numbers.run(arguments) == content


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"a": "5"}, 'a: must be a valid integer or a valid number, not "5"'),
        ({"a": True}, "a: must be a valid integer or a valid number, not true"),
        ({"a": None}, "a: must be a valid integer or a valid number, not null"),
        ({"a": [1]}, "a: must be a valid integer or a valid number, not [1]"),
        ({"a": 1, "c": 1.5}, "c: must be a valid integer, not 1.5"),
        ({"a": 1, "c": 1.0}, "c: must be a valid integer, not 1.0"),
        ({"a": 1, "b": "x" * 1000}, 'b: must be a valid number, not "' + "x" * 59 + "..."),
        ({}, "a: missing"),
        ({"a": 1, "d": 2}, "d: unknown parameter"),
        ({"d": 2, "b": "1"}, 'a: missing; b: must be a valid number, not "1"; d: unknown parameter'),
        ({"a": math.inf}, "a number is not finite, or has too many digits"),
        ({"a": math.nan}, "a number is not finite, or has too many digits"),
        pytest.param({"a": 10**5000}, "a number is not finite, or has too many digits", id="digits"),
    ],
)
async def test_wrong_arguments_are_told_field_by_field(arguments: Mapping[str, JSON], complaint: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        await numbers.run(arguments)
    assert str(refused.value) == complaint


@tool
async def nested(
    point: Point, points: Sequence[Point] = (), either: str | int | dict[str, int] = "", colour: Colour = Colour.RED
) -> str:
    """Says what it was given"""
    return f"{point!r} {list(points)!r} {either!r} {colour!r}"


async def test_objects_arrive_as_what_they_are_annotated_with() -> None:
    content = await nested.run({"point": {"title": "t", "x": 1, "at": "2024-05-06"}, "colour": "blue"})
    assert content == f"{Point(title='t', x=1, at=date(2024, 5, 6))!r} [] '' {Colour.BLUE!r}"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"point": {"x": 1}}, "point.title: missing"),
        ({"point": {"title": "t", "x": -1}}, "point.x: must be greater than or equal to 0, not -1"),
        ({"point": {"title": "t", "x": "1"}}, 'point.x: must be a valid integer or a valid number, not "1"'),
        ({"points": [{"title": "t", "x": 0}, {"title": 1, "x": 0}]}, "points[1].title: must be a valid string, not 1"),
        ({"either": [1]}, "either: must be a valid string or a valid integer or an object, not [1]"),
        ({"colour": "green"}, "colour: must be 'red' or 'blue', not \"green\""),
    ],
)
async def test_wrong_arguments_inside_others_are_told_with_their_path(
    arguments: dict[str, JSON], complaint: str
) -> None:
    with pytest.raises(ArgumentError) as refused:
        await nested.run({"point": {"title": "t", "x": 0}, **arguments})
    assert str(refused.value) == complaint


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    age: int


@tool
async def pet(animal: Annotated[Cat | Dog, Field(discriminator="kind")]) -> str:
    """Says what it was given"""
    return repr(animal)


@pytest.mark.parametrize(
    ("animal", "complaint"),
    [
        ({"kind": "cat"}, "animal.lives: missing"),
        ({"kind": "dog", "age": "1"}, 'animal.age: must be a valid integer, not "1"'),
        (
            {"kind": "cow"},
            "animal: Input tag 'cow' found using 'kind' does not match any of the expected tags: 'cat', 'dog'",
        ),
    ],
)
async def test_the_members_of_a_union_do_not_show_in_paths(animal: JSON, complaint: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        await pet.run({"animal": animal})
    assert str(refused.value) == complaint
    assert await pet.run({"animal": {"kind": "cat", "lives": 9}}) == "Cat(kind='cat', lives=9)"
    assert "$" not in pet.parameters_json_schema


async def test_many_complaints_are_cut_and_stay_on_one_line() -> None:
    with pytest.raises(ArgumentError) as refused:
        await nested.run({"point": {"title": "t", "x": 0}, "points": [{"x": 1}] * 1000})
    assert str(refused.value).endswith("points[4].title: missing; and 995 more")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda s: st.lists(s) | st.dictionaries(st.text(), s),
    )
)
@settings(deadline=None)
def test_no_argument_does_worse_than_a_complaint_of_one_line(value: JSON) -> None:
    point: JSON = {"title": "t", "x": 0}
    several = ({"a": value}, {"point": value}, {"point": point, "either": value, "points": value})

    async def complaints() -> list[str]:
        told: list[str] = []
        for each in (numbers, nested):
            for arguments in several:
                try:
                    await each.run(arguments)
                except ArgumentError as complaint:
                    told.append(str(complaint))
        return told

    assert all(len(text.splitlines()) == 1 for text in asyncio.run(complaints()))


async def test_names_that_no_parameter_has_are_shown_as_texts() -> None:
    with pytest.raises(ArgumentError) as refused:
        await numbers.run({"a": 1, "line\nfeed": 2, "": 3})
    assert str(refused.value) == '["line\\nfeed"]: unknown parameter; [""]: unknown parameter'


async def test_arguments_nested_without_end_are_refused() -> None:
    deep: JSON = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ArgumentError):
        await numbers.run({"a": deep})


@pytest.mark.parametrize(
    ("result", "content"),
    [
        ("8", "8"),
        ("", ""),
        ('{"as": "it is"}\n', '{"as": "it is"}\n'),
        (8, "8"),
        (-7, "-7"),
        (10**24, "1000000000000000000000000"),
        (2.5, "2.5"),
        (2.0, "2.0"),
        (0.1 + 0.2, "0.30000000000000004"),
        (1e300, "1e+300"),
        (True, "true"),
        (None, "null"),
        ([1, 2.5, "ä", None], '[1, 2.5, "ä", null]'),
        ({"a": {"b": True}}, '{"a": {"b": true}}'),
        ((1, 2), "[1, 2]"),
        (Point(title="t", x=1), '{"title": "t", "x": 1, "at": null}'),
        (Size(3), '{"width": 3}'),
        ([Size(3), Point(title="t", x=1.5)], '[{"width": 3}, {"title": "t", "x": 1.5, "at": null}]'),
        (Colour.RED, '"red"'),
        (Level.LOW, "1"),
        (date(2024, 5, 6), '"2024-05-06"'),
        (Decimal("1.10"), '"1.10"'),
    ],
)
async def test_how_results_are_written(result: object, content: str) -> None:
    @tool
    async def give() -> object:
        return result

    assert await give.run({}) == content


CIRCLE: list[object] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("result", "why"),
    [
        pytest.param(10**5000, "too many digits", id="digits"),
        (math.inf, "inf is not a finite number"),
        (math.nan, "nan is not a finite number"),
        ([math.inf], "not JSON compliant"),
        (object(), "Unable to serialize unknown type"),
        ({"a": threading.Lock()}, "Unable to serialize unknown type"),
        (CIRCLE, "Circular reference"),
    ],
)
async def test_a_result_that_cannot_be_written_is_a_tool_error_that_says_so(result: object, why: str) -> None:
    @tool
    async def give() -> object:
        return result

    with pytest.raises(ToolError) as refused:
        await give.run({})
    assert str(refused.value).startswith("The result of give cannot be written: ")
    assert why in str(refused.value)


async def test_a_coroutine_function_runs_on_the_loop_and_a_plain_one_in_a_thread() -> None:
    @tool
    async def here() -> int:
        return threading.get_ident()

    @tool
    def there() -> int:
        return threading.get_ident()

    assert await here.run({}) == str(threading.get_ident())
    assert await there.run({}) != str(threading.get_ident())


async def test_a_plain_function_does_not_hold_the_loop() -> None:
    go = threading.Event()

    @tool
    def hold() -> bool:
        return go.wait(60)

    held = asyncio.create_task(hold.run({}))
    await asyncio.sleep(0)
    go.set()
    assert await held == "true"


async def test_a_cancelled_call_leaves_its_thread_alone() -> None:
    go, left = threading.Event(), threading.Event()

    @tool
    def hold() -> None:
        go.wait(60)
        left.set()

    held = asyncio.create_task(hold.run({}))
    await asyncio.sleep(0)
    held.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held
    assert not left.is_set()
    go.set()
    assert await asyncio.to_thread(left.wait, 60)


async def test_a_plain_function_that_returns_a_coroutine_is_awaited() -> None:
    async def later(a: int) -> int:
        return 2 * a

    @tool
    @functools.wraps(later)
    def wrapped(a: int) -> object:
        return later(a)

    assert await wrapped.run({"a": 4}) == "8"


@pytest.mark.parametrize("error", [LookupError("gone"), ToolError("closed"), StopIteration()])
async def test_what_a_function_raises_passes(error: Exception) -> None:
    @tool
    def plain() -> None:
        raise error

    @tool
    async def awaited() -> None:
        raise error

    expected = RuntimeError if isinstance(error, StopIteration) else type(error)
    for each in (plain, awaited):
        with pytest.raises(expected):
            await each.run({})


async def test_defaults_that_can_change_are_not_shared_between_calls() -> None:
    @tool
    async def collect(item: int, into: list[int] = []) -> list[int]:  # noqa: B006 - authors write it, too
        into.append(item)
        return into

    assert [await collect.run({"item": number}) for number in (1, 2)] == ["[1]", "[2]"]

"""Valid arguments of tool calls, and the errors that the model receives for invalid ones."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Annotated, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from rollout_server import tool
from rollout_server.core.message import JSON
from rollout_server.runtime.errors import ArgumentError

from tests.agent.shapes import Colour, Number, Point


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
        ({"a": 1, "b": 10**400}, "b: must be a finite number, not 1" + "0" * 59 + "..."),
        ({"a": 1, "b": -(10**400)}, "b: must be a finite number, not -1" + "0" * 58 + "..."),
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


async def test_very_many_errors_are_only_counted() -> None:
    with pytest.raises(ArgumentError) as refused:
        await numbers.run({"a": 1, **{str(number): 1 for number in range(1001)}})
    assert str(refused.value) == "1,001 errors: unknown parameters, or values of the wrong type"


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

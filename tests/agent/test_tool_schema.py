"""JSON schemas of a tool's parameters."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import Callable
from datetime import date
from typing import Annotated, Any, Literal, Union

import pytest
from pydantic import Field
from rollout_server import tool

from tests.agent.shapes import Colour, Node, Number, Point, Size


def schema_of(function: Callable[..., object]) -> Any:
    return json.loads(tool(function).parameters_json_schema)


def properties_of(function: Callable[..., object]) -> Any:
    return schema_of(function)["properties"]


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
        (positional, "tool 'positional': parameter a: 'int' cannot be passed by name"),
        (starred, "tool 'starred': parameter *a"),
        (double_starred, "tool 'double_starred': parameter **a"),
        (untyped, "tool 'untyped': parameter a needs a type annotation"),
        (unknown, "tool 'unknown': name 'NoSuchType' is not defined"),
        (recursive, "tool 'recursive': the type Node is recursive"),
        (unserialisable, "tool 'unserialisable': "),
        (ünüsual, "tool 'ünüsual': a name has 1 to 64 letters"),
        (a_name_of_more_than_sixty_four_characters_which_no_trainer_has_to_accept, "1 to 64"),
        (lambda: None, "tool '<lambda>'"),
        (functools.partial(starred), "@tool needs a function or a method"),
        (Point, "@tool needs a function or a method"),
        (print, "@tool needs a function or a method"),
        (7, "@tool needs a function or a method, not 7"),
        (staticmethod(starred), "; write @staticmethod above @tool"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_by_name(function: Callable[..., object], says: str) -> None:
    with pytest.raises(TypeError) as refused:
        tool(function)
    assert says in str(refused.value)

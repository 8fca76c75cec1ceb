"""Errors in a tool's schema, and example arguments that fit a schema."""

from __future__ import annotations

import json
from datetime import date
from enum import Enum
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, Field
from rollout_client import Tool
from rollout_server import tool
from rollout_server.authoring.schema import advice, example_arguments, faults

OBJECT = '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}'
WRONG = {
    "name": (Tool(name="a b", parameters_json_schema=OBJECT), "the name 'a b' must have"),
    "json": (Tool(name="t", parameters_json_schema="{"), "its parameters are not JSON"),
    "list": (Tool(name="t", parameters_json_schema="[]"), "must be a JSON object"),
    "type": (Tool(name="t", parameters_json_schema='{"type": "strnig"}'), "not valid JSON Schema: ['type']"),
    "no_object": (Tool(name="t", parameters_json_schema='{"type": "string"}'), 'must have "type": "object"'),
    "required": (Tool(name="t", parameters_json_schema='{"type": "object", "required": ["b"]}'), "it requires 'b'"),
}


@pytest.mark.parametrize(("tool_", "said"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_said(tool_: Tool, said: str) -> None:
    assert said in "; ".join(faults(tool_))


def test_what_would_help_a_model_is_said() -> None:
    told = "; ".join(advice(Tool(name="t", parameters_json_schema=OBJECT)))
    assert "no description" in told
    assert "no description of a" in told
    assert list(faults(Tool(name="t", parameters_json_schema=OBJECT))) == []


class Colour(Enum):
    RED = "red"


class Point(BaseModel):
    x: Annotated[int, Field(gt=3, multiple_of=5)]
    y: Annotated[float, Field(ge=0.5, lt=1)]


@tool
def many(  # noqa: PLR0917 - one parameter of each kind
    colour: Colour,
    point: Point,
    points: Annotated[list[Point], Field(min_length=2)],
    word: Annotated[str, Field(min_length=3, max_length=4)],
    when: date,
    choice: Literal[7, 8],
    below: Annotated[int, Field(lt=-3)],
    pair: tuple[int, str],
    mapping: dict[str, int],
    number: int | float,
    maybe: str | None,
    flag: bool,
    default: int = 3,
) -> None:
    """Takes everything."""


async def test_arguments_that_are_made_up_are_taken() -> None:
    schema = json.loads(many.parameters_json_schema)
    made = example_arguments(schema)
    assert made is not None
    jsonschema.validate(made, schema)
    await many.run(made)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[0-9]{9}$"}}, "required": ["a"]},
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/A"}},
            "required": ["a"],
            "$defs": {"A": {"$ref": "#/$defs/A"}},
        },
        {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}, "required": ["a"]},
    ],
)
def test_where_nothing_can_be_made_up_nothing_is(schema: dict[str, Any]) -> None:
    assert example_arguments(schema) is None

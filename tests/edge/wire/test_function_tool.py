"""Tools in the format that clients of the asynchronous HTTP API validate, whatever their schemas are."""

import datetime
import enum
import json
from typing import Annotated, Any, Literal, Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from osmosis.rollout.v1.message_pb2 import Tool
from pydantic import BaseModel, Field, JsonValue, create_model
from rollout_server.edge.wire.function_tool import function_tool_json

from tests.support.async_client_models import ClientTool
from tests.support.transcripts import client_exchange, scenarios, without_nulls


def shaped(schema: Any, **fields: Any) -> dict[str, Any]:
    """The parameters that a client receives, after it has validated them."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    told = json.loads(function_tool_json(Tool(name="t", parameters_json_schema=text, **fields)))
    ClientTool.model_validate(told, strict=True)
    return dict(told["function"]["parameters"])


def prop(schema: Any, **more: Any) -> dict[str, Any]:
    """The converted form of one property."""
    return dict(shaped({"type": "object", "properties": {"p": schema}, **more})["properties"]["p"])


def test_the_calculators_tools_come_out_as_recorded() -> None:
    for scenario in scenarios("", "init"):
        answer = client_exchange(scenario, "init")
        for tool in answer["response"]["tools"] if answer["status"] == 202 else ():
            function = without_nulls(tool["function"])
            told = function_tool_json(
                Tool(
                    name=function["name"],
                    description=function["description"],
                    parameters_json_schema=json.dumps(function["parameters"]),
                )
            )
            assert json.loads(told) == without_nulls(tool)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string", "description": "A name."}, {"type": "string", "description": "A name."}),
        ({}, {"type": "string", "description": "Any JSON value"}),
        (True, {"type": "string", "description": "Any JSON value"}),
        ({"type": "any", "description": "It"}, {"type": "string", "description": "It (any JSON value)"}),
        # Null is dropped.
        ({"type": ["integer", "null"], "default": None}, {"type": "integer"}),
        ({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}, {"type": "string", "maxLength": 3}),
        ({"oneOf": [{"type": "null"}, {"type": "boolean"}], "default": True}, {"type": "boolean", "default": True}),
        ({"anyOf": [{"anyOf": [{"type": "null"}]}, {"type": ["array", "null"]}]}, {"type": "array"}),
        ({"type": "null"}, {"type": "null"}),
        ({"anyOf": [{"type": "null"}, {"const": None}]}, {"type": "null"}),
        ({"enum": [None]}, {"type": "null"}),
        # Number types are merged.
        ({"type": ["integer", "number"]}, {"type": "number"}),
        ({"anyOf": [{"type": "integer"}, {"type": "number"}]}, {"type": "number"}),
        # Unions of one type keep it; others are described in text.
        (
            {"anyOf": [{"type": "string", "format": "date"}, {"type": "string", "format": "time"}]},
            {"type": "string", "anyOf": [{"type": "string", "format": "date"}, {"type": "string", "format": "time"}]},
        ),
        (
            {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}, {"type": "null"}]},
            {"type": "integer", "description": 'Any of: integer, {"type":"array","items":{"type":"integer"}}'},
        ),
        ({"type": ["string", "integer"]}, {"type": "string", "description": "Any of: string, integer"}),
        ({"anyOf": [{"type": "string"}, {}]}, {"type": "string", "description": "Any JSON value"}),
        ({"anyOf": [{"not": {}}, {"type": "string"}]}, {"type": "string", "description": 'Any of: {"not":{}}, string'}),
        ({"anyOf": [False, {"type": "string"}]}, {"type": "string"}),
        # Enums become texts, or are described.
        ({"enum": ["a", "b"]}, {"type": "string", "enum": ["a", "b"]}),
        ({"enum": ["a", None, "a"], "type": ["string", "null"]}, {"type": "string", "enum": ["a"]}),
        ({"const": "a", "title": "It"}, {"type": "string", "enum": ["a"], "title": "It"}),
        ({"anyOf": [{"const": "a"}, {"enum": ["b"]}, {"type": "null"}]}, {"type": "string", "enum": ["a", "b"]}),
        (
            {"oneOf": [{"const": "a", "title": "Apple"}, {"const": "b", "title": "Pear"}]},
            {
                "type": "string",
                "enum": ["a", "b"],
                "oneOf": [{"const": "a", "title": "Apple"}, {"const": "b", "title": "Pear"}],
            },
        ),
        (
            {"type": "integer", "enum": [1, 2], "description": "How many."},
            {"type": "integer", "description": "How many. (one of: 1, 2)"},
        ),
        ({"enum": [1, 2.5]}, {"type": "number", "description": "One of: 1, 2.5"}),
        ({"const": 5}, {"type": "integer", "description": "Always 5", "const": 5}),
        ({"enum": ["a", 1, False]}, {"type": "string", "description": 'One of: "a", 1, false'}),
        ({"enum": [{"a": 1}]}, {"type": "object", "description": 'Always {"a":1}'}),
        ({"type": "string", "enum": []}, {"type": "string"}),
        ({"type": "string", "enum": "a"}, {"type": "string"}),
        # A missing type is inferred from other keywords.
        ({"items": {"type": "string"}}, {"type": "array", "items": {"type": "string"}}),
        ({"properties": {}}, {"type": "object", "properties": {}}),
        ({"minimum": 1}, {"type": "number", "minimum": 1}),
        ({"pattern": "^a"}, {"type": "string", "pattern": "^a"}),
        # Conjunctions.
        ({"allOf": [{"type": "string"}], "description": "It"}, {"type": "string", "description": "It"}),
        (
            {"allOf": [{"minLength": 1}, {"type": "string"}]},
            {"type": "string", "allOf": [{"minLength": 1}, {"type": "string"}]},
        ),
        # Further keys are kept.
        (
            {"type": "array", "items": {"type": ["string", "null"], "enum": ["a", None]}, "minItems": 2, "x-unit": [1]},
            {"type": "array", "items": {"type": ["string", "null"], "enum": ["a", None]}, "minItems": 2, "x-unit": [1]},
        ),
        ({"prefixItems": [{"const": 1}, True]}, {"type": "array", "prefixItems": [{"const": 1}, True]}),
        # Invalid schemas.
        ("text", {"type": "string", "description": "Any JSON value"}),
        ({"type": 7, "description": 3, "anyOf": "no"}, {"type": "string", "description": "Any JSON value"}),
        ({"type": ["", 3, "string"]}, {"type": "string"}),
    ],
)
def test_a_property_has_one_type_and_says_what_it_was(schema: Any, expected: dict[str, Any]) -> None:
    assert prop(schema) == expected


def test_references_are_written_out() -> None:
    defs = {
        "Unit": {"enum": ["m", "s"], "type": "string", "description": "A unit."},
        "a/b~c d": {"type": "array", "items": {"$ref": "#/$defs/Unit"}},
    }
    assert prop({"$ref": "#/$defs/Unit", "description": "Which."}, **{"$defs": defs}) == {
        "type": "string",
        "description": "Which.",
        "enum": ["m", "s"],
    }
    assert prop({"$ref": "#/$defs/a~1b~0c%20d"}, **{"$defs": defs}) == {"type": "array", "items": defs["Unit"]}
    assert prop({"$ref": "#/definitions/U"}, definitions={"U": {"type": "integer"}}) == {"type": "integer"}
    assert prop({"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]}, **{"$defs": defs})["enum"] == ["m", "s"]
    assert prop({"items": {"$ref": "#/allOf/1/not"}}, allOf=[{}, {"not": {"type": "integer"}}])["items"] == {
        "type": "integer"
    }


@pytest.mark.parametrize("reference", ["#/$defs/None", "#/$defs/7/x", "#x", "other.json", "", "#/properties/p/9", 3])
def test_a_reference_that_leads_nowhere_says_nothing(reference: Any) -> None:
    assert prop({"$ref": reference})["type"] == "string"
    assert prop({"$ref": reference, "type": "integer"}) == {"type": "integer"}


def test_a_schema_that_contains_itself_is_cut() -> None:
    node = {
        "type": "object",
        "title": "Node",
        "properties": {"next": {"$ref": "#/$defs/Node"}, "n": {"type": "integer"}},
    }
    told = shaped({"$ref": "#/$defs/Node", "$defs": {"Node": node}})
    assert told["properties"]["next"] == {"type": "object", "title": "Node"}
    assert prop({"$ref": "#/$defs/Node"}, **{"$defs": {"Node": node}})["properties"]["next"] == {
        "type": "object",
        "title": "Node",
    }
    loop = {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}
    assert prop({"$ref": "#/$defs/A"}, **{"$defs": loop})["type"] == "string"
    assert prop({"items": {"$ref": "#"}})["type"] == "array"


def test_references_that_multiply_are_written_out_to_a_bound() -> None:
    doubling: dict[str, Any] = {f"D{n}": {"type": "object", "properties": {}} for n in range(40)}
    for n in range(39):
        doubling[f"D{n}"]["properties"] = {name: {"$ref": f"#/$defs/D{n + 1}"} for name in "ab"}
    schema = {"type": "object", "properties": {"p": {"$ref": "#/$defs/D0"}}, "$defs": doubling}
    assert len(json.dumps(shaped(schema))) < 1_000_000
    union = {"anyOf": [{"minLength": 1, "anyOf": [{"type": "string"}, {"type": "integer"}]}, {"type": "null"}]}
    for _ in range(28):
        union = {"anyOf": [{"minLength": 1, "anyOf": [union, {"type": "integer"}]}, {"type": "null"}]}
    assert prop(union)["type"] in ("string", "integer")


def test_a_key_that_only_looks_like_a_keyword_stays() -> None:
    names = {"$ref": {"type": "string"}, "definitions": {"type": "string"}, "enum": {"type": "integer"}}
    assert shaped({"properties": names, "required": ["$ref"]})["properties"] == names
    default = {"$ref": "#/nowhere", "anyOf": None, "n": 1}
    assert prop({"type": "object", "default": default, "examples": [default]})["default"] == default


def test_numbers_stay_as_they_were_written() -> None:
    text = '{"properties":{"p":{"type":"number","maximum":18446744073709551617,"minimum":1.50,"default":1e400}}}'
    told = function_tool_json(Tool(name="t", parameters_json_schema=text))
    assert '"maximum":18446744073709551617,"minimum":1.50,"default":1e400' in told
    long = "9" * 5_000
    assert long in function_tool_json(Tool(parameters_json_schema=f'{{"properties":{{"p":{{"const":{long}}}}}}}'))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "true",
        "false",
        '"text"',
        "7",
        '{"a": NaN}',
        '{"properties":{"p":{"title":"\\ud800"}}}',
        "[" * 100_000,
        '{"type": "string", "minLength": 1}',
        '{"type": ["array", "null"]}',
        '{"properties": [], "required": {}}',
        '{"const": 1}',
    ],
)
def test_what_describes_no_object_reads_as_no_parameters(text: str) -> None:
    told = shaped(text)
    assert (told["type"], told["properties"], told["required"]) == ("object", {}, [])


def test_a_schema_that_cannot_be_read_is_logged_by_the_tools_name(caplog: pytest.LogCaptureFixture) -> None:
    broken = Tool(name="broken", parameters_json_schema="{")
    assert function_tool_json(broken) is function_tool_json(broken)  # converted once, so logged once
    assert caplog.text.count("'broken'") == 1


def test_what_is_required_is_there() -> None:
    told = shaped({"properties": {"a": {"type": "string"}, "no": False}, "required": ["a", 3, "b", "a", "no"]})
    assert told["required"] == ["a", "b"]
    assert told["properties"] == {"a": {"type": "string"}, "b": {"type": "string", "description": "Any JSON value"}}
    assert shaped({"type": "object", "additionalProperties": False})["additionalProperties"] is False


def test_an_object_made_of_others_has_their_properties() -> None:
    told = shaped(
        {
            "allOf": [
                {"properties": {"a": {"type": "string"}, "b": {"minimum": 1}}, "required": ["a"]},
                {"$ref": "#/$defs/More"},
            ],
            "$defs": {"More": {"properties": {"b": {"type": "integer"}}, "required": ["b"]}},
        }
    )
    assert told["required"] == ["a", "b"]
    assert (told["properties"]["a"]["type"], told["properties"]["b"]["type"]) == ("string", "number")


def test_an_object_of_several_forms_needs_what_they_all_need() -> None:
    cat = {"properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind", "lives"]}
    dog = {"properties": {"kind": {"const": "dog"}}, "required": ["kind"]}
    told = shaped({"anyOf": [cat, dog, {"type": "null"}, {"type": "string"}]})
    assert told["required"] == ["kind"]
    assert told["properties"] == {"kind": {"type": "string", "enum": ["cat", "dog"]}, "lives": {"type": "integer"}}
    either = {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    }
    assert shaped(either)["required"] == []
    assert shaped(either)["anyOf"] == [{"required": ["a"]}, {"required": ["b"]}]


def test_description_and_strict_are_always_there() -> None:
    told = json.loads(function_tool_json(Tool(name="t")))
    assert (told["function"]["description"], told["function"]["strict"]) == ("", False)
    assert json.loads(function_tool_json(Tool(name="t", strict=True)))["function"]["strict"] is True


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Tree(BaseModel):
    """A tree."""

    value: int
    children: list["Tree"] = []
    parent: Optional["Tree"] = None


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    bark: str | None = None


ANNOTATIONS: list[Any] = [
    int,
    float | None,
    str | int,
    Any,
    Literal["x", "y"],
    Literal["x", 1, None],
    Literal[5],
    Colour | None,
    Colour | int,
    Level,
    list[Tree],
    Tree | None,
    dict[str, Tree],
    tuple[int, str],
    set[Colour],
    Annotated[Cat | Dog, Field(discriminator="kind")],
    datetime.date | datetime.datetime,
    JsonValue,
    list[int] | list[str] | None,
    Annotated[int, Field(ge=1)] | float,
    None,
    bytes,
]


@settings(deadline=None, max_examples=60)
@given(chosen=st.lists(st.sampled_from(ANNOTATIONS), max_size=6), described=st.booleans(), needed=st.booleans())
def test_every_model_of_pydantics_validates(chosen: list[Any], described: bool, needed: bool) -> None:
    default: Any = ... if needed else None
    description = "What it is." if described else None
    fields: dict[str, Any] = {
        f"field_{index}": (each, Field(default, description=description)) for index, each in enumerate(chosen)
    }
    model = create_model("Arguments", **fields)
    told = shaped(model.model_json_schema())
    assert list(told["properties"]) == list(fields)
    assert told["required"] == (list(fields) if needed else [])
    assert "$" not in json.dumps(told)
    if described:
        assert all("What it is." in each["description"] for each in told["properties"].values())


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
)
JSONS = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
WORDS = st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null", "any", ""])
POINTERS = st.sampled_from(
    ["#", "#/$defs/A", "#/$defs/B", "#/properties/a", "#/anyOf/0", "#/$defs/A/items", "#/nowhere"]
)


def schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(st.sampled_from(["a", "b", "$ref", "enum"]), inner, max_size=3)
    listed = st.lists(inner, max_size=3)
    kept = {
        "type": WORDS | st.lists(WORDS, max_size=3) | JSONS,
        "$ref": POINTERS,
        "$defs": st.fixed_dictionaries({}, optional={"A": inner, "B": inner}),
        "properties": named | JSONS,
        "required": st.lists(st.sampled_from(["a", "b", "c"]), max_size=3) | JSONS,
        "items": inner | listed,
        "additionalProperties": inner,
        "anyOf": listed | JSONS,
        "oneOf": listed,
        "allOf": listed,
        "prefixItems": listed,
        "enum": st.lists(JSONS, max_size=4) | JSONS,
        "const": JSONS,
        "default": JSONS,
        "description": st.text(max_size=5) | JSONS,
        "minimum": JSONS,
    }
    return st.fixed_dictionaries({}, optional=kept)


@settings(deadline=None, max_examples=150)
@given(schema=st.recursive(st.booleans() | JSONS, schemas, max_leaves=8))
def test_any_schema_validates(schema: Any) -> None:
    told = shaped(schema)
    assert set(told["required"]) <= told["properties"].keys()


@settings(deadline=None)
@given(text=st.text(max_size=20), name=st.text(st.characters(exclude_categories=["Cs"])), strict=st.booleans())
def test_any_text_validates(text: str, name: str, strict: bool) -> None:
    told = json.loads(function_tool_json(Tool(name=name, description=name, parameters_json_schema=name, strict=strict)))
    ClientTool.model_validate(told, strict=True)
    assert (told["function"]["name"], told["function"]["strict"]) == (name, strict)

"""A tool accepts exactly the arguments that `jsonschema` accepts for its schema.

Exceptions, all of them tested below:

| the schema | the tool |
|---|---|
| allows 1.0 for an integer | accepts only 1: numbers are not converted |
| allows further parameters | refuses them by name: the model has misspelt one |
| lets an optional value be omitted | also accepts null for it, as models write it |
| treats the format of a text (date, ...) as an annotation | refuses invalid texts |
| requires unique items of a set | accepts duplicates and keeps one |
| requires texts as keys of a dict | accepts texts that parse as its key type |
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, make_dataclass
from datetime import date
from enum import Enum
from typing import Annotated, Any, Literal, NotRequired

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from jsonschema.validators import extend
from pydantic import Field, create_model
from rollout_server import tool
from rollout_server.runtime.errors import ArgumentError
from rollout_server.tool import FunctionTool
from typing_extensions import TypedDict  # before Python 3.12, pydantic requires the one of typing_extensions

GIVEN = os.environ.get("ROLLOUT_EXAMPLES", "")
EXAMPLES = int(GIVEN) if GIVEN.isdigit() else 100
"""Number of signatures. Each is called with ten sets of arguments."""

CALLS = 10
NAMES = ("a", "b", "title", "type", "items", "model_config")


def is_integer(_: object, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


STRICT = extend(Draft202012Validator, type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", is_integer))


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Level(Enum):
    LOW = 1
    HIGH = 2


bounds = st.integers(-3, 3)
LENGTHS = st.integers(0, 2)
leaves = st.one_of(
    st.sampled_from([int, float, bool, str, int | float, Colour, Level, Any]),
    # Without 1 and True: pydantic confuses them if a Literal contains one of them (see the exceptions).
    st.lists(st.sampled_from(["x", "y", 2, 3]), min_size=1, max_size=3).map(
        lambda values: Literal[tuple(values)]  # type: ignore[misc]
    ),
    st.builds(lambda low, more: Annotated[int, Field(ge=low, le=low + more)], bounds, st.integers(0, 4)),
    st.builds(lambda low: Annotated[float, Field(gt=low)], bounds),
    st.builds(lambda high: Annotated[int | float, Field(lt=high)], bounds),
    st.builds(lambda many: Annotated[int, Field(multiple_of=many)], st.integers(1, 3)),
    st.builds(lambda low: Annotated[int | None, Field(ge=low)], bounds),
    st.builds(
        lambda low, more: Annotated[str, Field(min_length=low, max_length=low + more)],
        st.integers(0, 2),
        st.integers(0, 3),
    ),
    st.sampled_from(["^x", "y$", "^[a-c]*$"]).map(lambda pattern: Annotated[str, Field(pattern=pattern)]),
)


def fields_of(types: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, tuple[Any, bool]]]:
    return st.dictionaries(st.sampled_from(NAMES[:4]), st.tuples(types, st.booleans()), min_size=1, max_size=3)


def model(shape: Mapping[str, tuple[Any, bool]]) -> Any:
    members: dict[str, Any] = {name: (of, ...) if needed else (of | None, None) for name, (of, needed) in shape.items()}
    return create_model("Model", **members)


def data(shape: Mapping[str, tuple[Any, bool]]) -> Any:
    needed = [(name, of) for name, (of, is_needed) in shape.items() if is_needed]
    others = [(name, of | None, field(default=None)) for name, (of, is_needed) in shape.items() if not is_needed]
    return make_dataclass("Data", [*needed, *others])


def typed(shape: Mapping[str, tuple[Any, bool]]) -> Any:
    return TypedDict("Typed", {name: of if needed else NotRequired[of] for name, (of, needed) in shape.items()})  # type: ignore[misc]


def nest(types: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        types.map(lambda of: list[of]),  # type: ignore[valid-type]
        st.builds(
            lambda of, low: Annotated[list[of], Field(min_length=low, max_length=low + 2)], types, st.integers(0, 2)
        ),  # type: ignore[valid-type]
        types.map(lambda of: dict[str, of]),  # type: ignore[valid-type]
        types.map(lambda of: tuple[of, ...]),  # type: ignore[valid-type]
        types.map(lambda of: of | None),
        st.tuples(types, types).map(lambda both: both[0] | both[1]),
        LENGTHS.flatmap(lambda low: types.map(lambda of: Annotated[list[of] | None, Field(min_length=low)])),  # type: ignore[valid-type]
        LENGTHS.flatmap(
            lambda low: types.map(lambda of: Annotated[str | list[of] | dict[str, of], Field(max_length=low)])  # type: ignore[valid-type]
        ),
        fields_of(types).map(model),
        fields_of(types).map(data),
        fields_of(types).map(typed),
    )


annotations = st.recursive(leaves, nest, max_leaves=4)
signatures = st.dictionaries(st.sampled_from(NAMES), st.tuples(annotations, st.booleans()), min_size=1, max_size=3)


def tool_of(signature: Mapping[str, tuple[Any, bool]]) -> FunctionTool[..., object]:
    """A tool with these parameters; optional ones default to None."""

    def made(**arguments: object) -> object:
        return sorted(arguments)

    annotated = {name: of if needed else of | None for name, (of, needed) in signature.items()}
    made.__annotations__ = annotated
    made.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=annotated[name],
                default=inspect.Parameter.empty if needed else None,
            )
            for name, (_, needed) in signature.items()
        ]
    )
    return tool(made)


texts = st.text(st.sampled_from("xyab é"), max_size=4)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-5, 5) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=2),
    max_leaves=3,
)


@st.composite
def members(draw: st.DrawFn, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Mostly all required members, and some of the others."""
    names = [name for name in schema["properties"] if name in schema["required"] or draw(st.booleans())]
    return {name: draw(values(schema["properties"][name])) for name in names if draw(st.integers(0, 15))}


@st.composite
def values(draw: st.DrawFn, schema: Mapping[str, Any]) -> Any:  # noqa: PLR0911
    """Mostly values that fit the schema, sometimes others."""
    if draw(st.integers(0, 11)) == 0:
        return draw(anything)
    if "enum" in schema:
        return draw(st.sampled_from(schema["enum"]))
    if "anyOf" in schema:
        return draw(values(draw(st.sampled_from(schema["anyOf"]))))
    match schema.get("type"):
        case "integer":
            return draw(st.integers(schema.get("minimum", -5), schema.get("maximum", 5)))
        case "number":
            return draw(st.integers(-5, 5) | st.floats(-5, 5))
        case "string":
            return draw(texts)
        case "boolean":
            return draw(st.booleans())
        case "array":
            return draw(st.lists(values(schema.get("items", {})), min_size=schema.get("minItems", 0), max_size=3))
        case "object" if "properties" in schema:
            return draw(members(schema))
        case "object":
            further = schema.get("additionalProperties")
            return draw(st.dictionaries(texts, values(further if isinstance(further, dict) else {}), max_size=2))
    return draw(anything)


def holds_null(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(holds_null, value.values()))
    return value is None or (isinstance(value, list) and any(map(holds_null, value)))


def accepts(made: FunctionTool[..., object], arguments: Mapping[str, Any]) -> bool:
    try:
        made.run_here(arguments)
    except ArgumentError:
        return False
    return True


@settings(max_examples=EXAMPLES, deadline=None)
@given(signatures, st.data())
def test_the_tool_accepts_what_its_schema_does(signature: Mapping[str, tuple[Any, bool]], data: st.DataObject) -> None:
    made = tool_of(signature)
    schema = json.loads(made.parameters_json_schema)
    Draft202012Validator.check_schema(schema)
    validator = STRICT(schema)
    for _ in range(CALLS):
        arguments = data.draw(members(schema))
        if data.draw(st.integers(0, 15)) == 0:
            arguments[data.draw(st.sampled_from(NAMES))] = data.draw(anything)
        fits, accepted = validator.is_valid(arguments), accepts(made, arguments)
        if not arguments.keys() <= schema["properties"].keys():
            assert not accepted, arguments
        elif holds_null(arguments):
            assert accepted or not fits, (schema, arguments)
        else:
            assert accepted == fits, (schema, arguments)


def exceptions_one(a: int) -> int:
    return a


def exceptions_null(a: int | None = None) -> int | None:
    return a


def exceptions_date(a: date) -> str:
    return a.isoformat()


def exceptions_set(a: set[int]) -> Sequence[int]:
    return sorted(a)


def exceptions_keys(a: dict[int, int]) -> dict[int, int]:
    return a


def exceptions_literal(a: Literal["x", 1]) -> object:
    return a


@pytest.mark.parametrize(
    ("function", "arguments", "fits", "accepted"),
    [
        (exceptions_literal, {"a": True}, False, True),
        (exceptions_one, {"a": 1.0}, True, False),
        (exceptions_one, {"a": 1, "b": 2}, True, False),
        (exceptions_null, {"a": None}, False, True),
        (exceptions_date, {"a": "tomorrow"}, True, False),
        (exceptions_set, {"a": [1, 1]}, False, True),
        (exceptions_keys, {"a": {"1": 2}}, True, True),
        (exceptions_keys, {"a": {"x": 2}}, True, False),
    ],
)
def test_the_exceptions(
    function: Callable[..., object], arguments: Mapping[str, Any], fits: bool, accepted: bool
) -> None:
    made = tool(function)
    assert Draft202012Validator(json.loads(made.parameters_json_schema)).is_valid(arguments) is fits
    assert accepts(made, arguments) is accepted

"""Checks of tools as the model sees them: errors in their schemas, and example arguments for a dry run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jsonschema
from rollout_client import Tool

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LONGEST_DESCRIPTION: Final = 1024
_DEEPEST: Final = 32
_BOUNDS: Final = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf")


def faults(tool: Tool) -> Iterator[str]:
    """Yield what makes a tool invalid as a function of OpenAI's chat completions API."""
    if not _NAME.fullmatch(tool.name):
        yield f"the name {tool.name!r} must have 1 to 64 letters, digits, _ or -"
    try:
        schema = json.loads(tool.parameters_json_schema)
    except (ValueError, RecursionError) as error:
        yield f"its parameters are not JSON: {error}"
        return
    if not isinstance(schema, dict):
        yield "its parameters must be a JSON object"
        return
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        path = "".join(f"[{part!r}]" for part in error.absolute_path)
        yield f"its parameters are not valid JSON Schema: {path or 'the schema'}: {error.message}"
        return
    if schema.get("type") != "object":
        yield 'its parameters must have "type": "object"'
    properties = schema.get("properties", {})
    unknown = [name for name in schema.get("required", []) if name not in properties]
    if unknown:
        yield f"it requires {', '.join(map(repr, unknown))}, which its properties do not define"


def advice(tool: Tool) -> Iterator[str]:
    """Yield what would help a model to call the tool correctly."""
    if not tool.description.strip():
        yield "it has no description, by which models choose tools; write a docstring"
    if len(tool.description) > _LONGEST_DESCRIPTION:
        yield f"its description has {len(tool.description)} characters; some endpoints refuse more than {_LONGEST_DESCRIPTION}"
    schema = json.loads(tool.parameters_json_schema)
    bare = [name for name, shape in schema.get("properties", {}).items() if not _has_description(shape)]
    if bare:
        yield f'no description of {", ".join(bare)}; use Annotated[..., "description"] or the docstring\'s Args'


def _has_description(shape: object) -> bool:
    return isinstance(shape, Mapping) and bool(shape.get("description"))


def example_arguments(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return arguments that are valid for a schema, or None if none could be constructed."""
    try:
        made = _example(schema, schema, 0)
        jsonschema.Draft202012Validator(schema).validate(made)
    except (jsonschema.ValidationError, jsonschema.SchemaError, LookupError, RecursionError, TypeError):
        return None
    return made if isinstance(made, dict) else None


def _example(shape: Any, root: Mapping[str, Any], depth: int) -> Any:
    if depth > _DEEPEST:
        raise RecursionError
    if not isinstance(shape, Mapping):
        return None
    if "$ref" in shape:
        return _example(_resolve(shape["$ref"], root), root, depth + 1)
    for key in ("const", "default"):
        if key in shape:
            return shape[key]
    for key in ("enum", "examples"):
        if shape.get(key):
            return shape[key][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if shape.get(key):
            merged = {**shape, **shape[key][0]}
            merged.pop(key)
            return _example(merged, root, depth + 1)
    kinds = shape.get("type", "object" if "properties" in shape else "string")
    return _of_kind(kinds[0] if isinstance(kinds, list) else kinds, shape, root, depth)


def _of_kind(kind: str, shape: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Any:
    match kind:
        case "object":
            properties = shape.get("properties", {})
            return {name: _example(properties[name], root, depth + 1) for name in shape.get("required", [])}
        case "array":
            first = shape.get("prefixItems", [])
            count = max(shape.get("minItems", 0), len(first))
            items = [*first, *[shape.get("items", {})] * (count - len(first))]
            return [_example(item, root, depth + 1) for item in items]
        case "integer" | "number":
            return _number(shape, whole=kind == "integer")
        case "boolean":
            return True
        case "null":
            return None
    return _FORMATS.get(shape.get("format", ""), "a").ljust(shape.get("minLength", 0), "a")[: shape.get("maxLength")]


_FORMATS: Final[Mapping[str, str]] = {
    "date": "2024-01-01",
    "date-time": "2024-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "email": "somebody@example.com",
    "uri": "https://example.com",
}


def _number(shape: Mapping[str, Any], *, whole: bool) -> float:
    """Return the first of some likely numbers that satisfies the bounds."""
    step: float = shape.get("multipleOf", 1)
    low = shape.get("minimum", shape.get("exclusiveMinimum"))
    high = shape.get("maximum", shape.get("exclusiveMaximum"))
    likely: list[float] = [1, 0, step]
    if low is not None:
        next_one = -(-low // step) * step
        likely += [low, next_one, next_one + step]
    if high is not None:
        last = high // step * step
        likely += [high, last, last - step]
    if low is not None and high is not None:
        likely.append((low + high) / 2)
    bounds = {key: shape[key] for key in _BOUNDS if key in shape}
    rule = jsonschema.Draft202012Validator({"type": "integer" if whole else "number", **bounds})
    return next((value for value in likely if rule.is_valid(value)), step)


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found[part.replace("~1", "/").replace("~0", "~")]
    return found

"""JSON Schemas in the form of OpenAI's function tools.

The input comes from pydantic, for types that authors wrote, so a schema that this form cannot express is refused.
`edge/wire/json_schema` reads schemas of any origin for clients, and refuses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollout_server.core.message import JSON

_DROPPED = ("title", "$defs", "$ref", "anyOf", "oneOf", "const", "discriminator")
_IMPLIED = (("additionalProperties", False), ("additionalProperties", True), ("default", None))
_VERBATIM = ("default", "enum", "examples", "required")
_ORDER = ("type", "description", "enum", "items", "properties", "required")
# Pydantic writes bounds of a whole union with its own names instead of JSON Schema's.
_BOUNDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}
# Pydantic writes length bounds beside a union as those of strings, whatever the members' types are.
_LENGTHS = {
    "array": {"minLength": "minItems", "maxLength": "maxItems"},
    "object": {"minLength": "minProperties", "maxLength": "maxProperties"},
    "string": {"minLength": "minLength", "maxLength": "maxLength"},
}


def plain_schema(
    node: Mapping[str, JSON], defs: Mapping[str, Mapping[str, JSON]], inside: Sequence[str]
) -> dict[str, JSON]:
    """Rewrite a schema: inline references, flatten optional and number unions, drop titles. Raises TypeError for a recursive type.

    `defs` has the definitions that references point to, `inside` the names of those that are being inlined, to detect recursion.
    """
    shaped: dict[str, JSON] = {}
    reference = node.get("$ref")
    if isinstance(reference, str):
        name = reference.removeprefix("#/$defs/")
        if name in inside:
            raise TypeError(f"the type {name} is recursive, which a schema without references cannot express")
        shaped = plain_schema(defs[name], defs, (*inside, name))
    options = node.get("anyOf") or node.get("oneOf")
    if isinstance(options, list):
        lengths = {key: node[key] for key in ("minLength", "maxLength") if key in node}
        node = {key: value for key, value in node.items() if key not in lengths}
        shaped |= _merge_options([_with_lengths(plain_schema(option, defs, inside), lengths) for option in options])
    if "const" in node:
        shaped["enum"] = [node["const"]]
    for key, value in node.items():
        if key in _DROPPED or (key, value) in _IMPLIED:
            continue
        shaped[_BOUNDS.get(key, key)] = _inner(key, value, defs, inside)
    if "properties" in shaped:
        shaped.setdefault("required", [])
    return dict(sorted(shaped.items(), key=lambda item: _ORDER.index(item[0]) if item[0] in _ORDER else len(_ORDER)))


def _inner(key: str, value: JSON, defs: Mapping[str, Mapping[str, JSON]], inside: Sequence[str]) -> JSON:
    if key in _VERBATIM:
        return value
    if key in ("properties", "patternProperties") and isinstance(value, dict):
        return {name: plain_schema(shape, defs, inside) for name, shape in value.items()}
    if isinstance(value, dict):
        return plain_schema(value, defs, inside)
    if isinstance(value, list):
        return [plain_schema(item, defs, inside) if isinstance(item, dict) else item for item in value]
    return value


def _with_lengths(option: dict[str, JSON], lengths: Mapping[str, JSON]) -> dict[str, JSON]:
    names = _LENGTHS.get(str(option.get("type")), {})
    return option | {names[key]: value for key, value in lengths.items() if key in names}


def _merge_options(options: list[dict[str, JSON]]) -> dict[str, JSON]:
    left = [option for option in options if option != {"type": "null"}]
    if {"type": "number"} in left:
        left = [option for option in left if option != {"type": "integer"}]
    return left[0] if len(left) == 1 else {"anyOf": left}

"""Conversion of tools to the shape that clients of the asynchronous HTTP API validate.

That shape allows a single type per property and only strings in `enum`. Keywords that still hold after the conversion are kept.
What the shape cannot express is added to the property's description, which every client shows to its model.
"""

import json
import logging
from functools import lru_cache
from typing import Final

import msgspec
from osmosis.rollout.v1.message_pb2 import Tool

from rollout_server.edge.wire.json_schema import (
    ANY,
    JSON,
    UNIONS,
    Schema,
    distinct,
    flatten_unions,
    inline_references,
    kinds,
    members,
    values,
)

_LOG = logging.getLogger(__name__)
_OWN: Final = frozenset({"type", "properties", "required"})
_CHOICE: Final = frozenset({"type", "const", "enum"})


def function_tool_json(tool: Tool) -> str:
    """Return one element of `StartRolloutResponse.function_tools_json`, where the shape is documented.

    A schema that is not valid JSON is logged and treated as one without parameters.
    """
    return _function_tool_json(tool.name, tool.description, tool.parameters_json_schema, tool.strict)


@lru_cache(maxsize=256)  # Most agents have the same tools in each rollout.
def _function_tool_json(name: str, description: str, schema: str, strict: bool) -> str:
    try:
        parameters = _json_text(_parameters(_parse_object(schema)))
    except (ValueError, RecursionError) as error:
        _LOG.warning(
            "tool %r: its schema is not valid JSON, so clients get a schema without parameters: %s", name, error
        )
        parameters = _json_text(_parameters({}))
    function: Schema = {
        "name": name,
        "description": description,
        "parameters": msgspec.Raw(parameters),
        "strict": strict,
    }
    return _json_text({"type": "function", "function": function})


def _parse_object(text: str) -> Schema:
    found = json.loads(text or "{}", parse_int=_number_text, parse_float=_number_text, parse_constant=_reject_constant)
    return found if isinstance(found, dict) else {}


def _number_text(text: str) -> msgspec.Raw:
    return msgspec.Raw(text.encode())


def _reject_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _parameters(schema: Schema) -> Schema:
    """Return the schema of the arguments object."""
    root = flatten_unions(inline_references(schema))
    if not _may_be_object(root):
        root = {}
    found, required = _gather_properties(root)
    for name in required:
        found.setdefault(name, {})
    properties: Schema = {name: _property(each) for name, each in found.items() if each is not False}
    needed: list[JSON] = [name for name in required if name in properties]
    rest = {key: value for key, value in root.items() if key not in _OWN}
    return {"type": "object", "properties": properties, "required": needed, **rest}


def _gather_properties(root: Schema) -> tuple[Schema, list[str]]:
    """Return the properties of a flattened object schema and of its allOf/anyOf/oneOf members, and the names always required."""
    own, names = root.get("properties"), root.get("required")
    properties = dict(own) if isinstance(own, dict) else {}
    required = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    for member in members(root, "allOf"):
        more, needed = _gather_properties(member)
        required += needed
        for name, each in more.items():
            known = properties.setdefault(name, each)
            if known != each:
                properties[name] = {"allOf": [known, each]}
    for key in UNIONS:
        gathered = [_gather_properties(member) for member in members(root, key) if _may_be_object(member)]
        for name in dict.fromkeys(name for more, _ in gathered for name in more):
            options = distinct(more[name] for more, _ in gathered if name in more)
            properties.setdefault(name, options[0] if len(options) == 1 else {"anyOf": options})
        if gathered:
            always = set.intersection(*(set(needed) for _, needed in gathered))
            required += [name for name in gathered[0][1] if name in always]
    return properties, list(dict.fromkeys(required))


def _may_be_object(node: Schema) -> bool:
    return not {"object", ANY}.isdisjoint(kinds(node))


def _property(schema: JSON) -> Schema:
    """Return the schema of one property with a single type, a string as description and only strings in `enum`."""
    node = flatten_unions(schema if isinstance(schema, dict) else {})
    words, choices = kinds(node), values(node)
    mixed = len(words) > 1
    dropped = {"type", "description", "enum"}
    if node.get("default") is None:
        dropped.add("default")
    if mixed or (choices and all(member.keys() <= _CHOICE for key in UNIONS for member in members(node, key))):
        dropped.update(UNIONS)
    shaped: Schema = {"type": next((word for word in words if word != ANY), "string")}
    note = ""
    if choices and all(isinstance(choice, str) for choice in choices):
        shaped["enum"] = choices
        dropped.add("const")
    elif choices and choices != [None]:
        note = f"{'always' if len(choices) == 1 else 'one of:'} {', '.join(map(_json_text, choices))}"
    elif mixed:
        note = f"any of: {', '.join(_alternatives(node) or words)}"
    elif words == [ANY]:
        note = "any JSON value"
    if text := _with_hint(node.get("description"), note):
        shaped["description"] = text
    return {**shaped, **{key: value for key, value in node.items() if key not in dropped}}


def _alternatives(node: Schema) -> list[str]:
    """Return the members of a union as texts; empty if the schema has no union (only a list of types)."""
    found = [member for key in UNIONS for member in members(node, key)]
    return [str(member["type"]) if member.keys() == {"type"} else _json_text(member) for member in found]


def _with_hint(description: JSON, note: str) -> str:
    text = description if isinstance(description, str) else ""
    if not note or not text.strip():
        return text or note[:1].upper() + note[1:]
    return f"{text} ({note})"


def _json_text(value: JSON) -> str:
    return msgspec.json.encode(value).decode()

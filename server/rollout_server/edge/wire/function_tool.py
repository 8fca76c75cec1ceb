"""Tools in the shape that clients of the asynchronous dialect validate.

That shape knows one type word for each property, and texts alone as choices. What remains true of a schema stays as keys
beside them; what those keys cannot say goes into the property's description, which every client shows its model.
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
    """One element of `StartRolloutResponse.function_tools_json`, which describes the shape.

    Any text will do for a schema: one that is not JSON reads as no parameters.
    """
    return _function_tool_json(tool.name, tool.description, tool.parameters_json_schema, tool.strict)


@lru_cache(maxsize=256)  # An agent's tools are the same in each rollout, unless it makes them for each request.
def _function_tool_json(name: str, description: str, schema: str, strict: bool) -> str:
    try:
        parameters = _json_text(_parameters(_parse_object(schema)))
    except (ValueError, RecursionError) as error:
        _LOG.warning("tool %r: its schema cannot be read, so clients are told of no parameters: %s", name, error)
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
    """The schema of an object of arguments."""
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
    """The properties of a flattened object and of the members it is made of; the names of those that are always needed."""
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
    """A property, with one type word, a description that is text, and choices that are texts."""
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
    if told := _with_hint(node.get("description"), note):
        shaped["description"] = told
    return {**shaped, **{key: value for key, value in node.items() if key not in dropped}}


def _alternatives(node: Schema) -> list[str]:
    """The members of a union for a reader; none where it is only a list of type words."""
    found = [member for key in UNIONS for member in members(node, key)]
    return [str(member["type"]) if member.keys() == {"type"} else _json_text(member) for member in found]


def _with_hint(description: JSON, note: str) -> str:
    told = description if isinstance(description, str) else ""
    if not note or not told.strip():
        return told or note[:1].upper() + note[1:]
    return f"{told} ({note})"


def _json_text(value: JSON) -> str:
    return msgspec.json.encode(value).decode()

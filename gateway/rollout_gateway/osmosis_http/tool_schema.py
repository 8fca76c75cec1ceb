"""Tools in the shape that clients of the asynchronous dialect validate.

That shape knows one type word for each property, and texts alone as choices. What remains true of a schema stays as keys
beside them; what those keys cannot say goes into the property's description, which every client shows its model.
"""

import json
import logging
from typing import Final

import msgspec
from osmosis.rollout.v1.message_pb2 import Tool

from rollout_gateway.osmosis_http.json_schema import (
    ANY,
    JSON,
    UNIONS,
    Schema,
    distinct,
    flattened,
    inlined,
    kinds,
    members,
    values,
)

_LOG = logging.getLogger(__name__)
_OWN: Final = frozenset({"type", "properties", "required"})
_CHOICE: Final = frozenset({"type", "const", "enum"})


def function_tool(tool: Tool) -> msgspec.Raw:
    """A tool as JSON: `{"type": "function", "function": {"name", "description", "parameters", "strict"}}`.

    Of the parameters, each property has one `type` and at most an `enum` of texts; `properties` and `required` are always
    there. Any text will do for a schema: one that is not JSON reads as no parameters.
    """
    try:
        return _written(tool, _parameters(_read(tool.parameters_json_schema)))
    except (ValueError, RecursionError) as error:
        _LOG.warning("tool %r: its schema cannot be read, so clients are told of no parameters: %s", tool.name, error)
        return _written(tool, _parameters({}))


def _written(tool: Tool, parameters: Schema) -> msgspec.Raw:
    function = {"name": tool.name, "description": tool.description, "parameters": parameters, "strict": tool.strict}
    return msgspec.Raw(msgspec.json.encode({"type": "function", "function": function}))


def _read(text: str) -> Schema:
    found = json.loads(text or "{}", parse_int=_number, parse_float=_number, parse_constant=_not_json)
    return found if isinstance(found, dict) else {}


def _number(text: str) -> msgspec.Raw:
    return msgspec.Raw(text.encode())


def _not_json(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _parameters(schema: Schema) -> Schema:
    """The schema of an object of arguments."""
    root = flattened(inlined(schema))
    if not _may_be_object(root):
        root = {}
    found, required = _gathered(root)
    for name in required:
        found.setdefault(name, {})
    properties: Schema = {name: _property(each) for name, each in found.items() if each is not False}
    needed: list[JSON] = [name for name in required if name in properties]
    rest = {key: value for key, value in root.items() if key not in _OWN}
    return {"type": "object", "properties": properties, "required": needed, **rest}


def _gathered(root: Schema) -> tuple[Schema, list[str]]:
    """The properties of a flattened object and of the members it is made of; the names of those that are always needed."""
    own, names = root.get("properties"), root.get("required")
    properties = dict(own) if isinstance(own, dict) else {}
    required = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    for member in members(root, "allOf"):
        more, needed = _gathered(member)
        required += needed
        for name, each in more.items():
            known = properties.setdefault(name, each)
            if known != each:
                properties[name] = {"allOf": [known, each]}
    for key in UNIONS:
        gathered = [_gathered(member) for member in members(root, key) if _may_be_object(member)]
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
    node = flattened(schema if isinstance(schema, dict) else {})
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
        note = f"{'always' if len(choices) == 1 else 'one of:'} {', '.join(map(_text, choices))}"
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
    return [str(member["type"]) if member.keys() == {"type"} else _text(member) for member in found]


def _with_hint(description: JSON, note: str) -> str:
    told = description if isinstance(description, str) else ""
    if not note or not told.strip():
        return told or note[:1].upper() + note[1:]
    return f"{told} ({note})"


def _text(value: JSON) -> str:
    return msgspec.json.encode(value).decode()

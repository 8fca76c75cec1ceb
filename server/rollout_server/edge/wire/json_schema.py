"""Simplification of JSON Schemas for clients that support only a part of the standard: no references, flat unions, explicit types.

A recursive schema has no form without references, and nested references can grow exponentially. Therefore a reference is expanded
only once on each path, and all expansions together are limited. Beyond that a schema is reduced to its outline.
"""

from collections.abc import Iterable
from typing import Final, TypeAlias, TypeVar
from urllib.parse import unquote

import msgspec

# Numbers keep their original text, as `msgspec.Raw`: Python's float would round them.
JSON: TypeAlias = "str | bool | msgspec.Raw | list[JSON] | dict[str, JSON] | None"
Schema: TypeAlias = dict[str, JSON]

_MAX_DEPTH: Final = 32
_MAX_WRITTEN_OUT: Final = 5_000
# Keywords that map names to schemas.
_NAMED: Final = frozenset({"properties", "patternProperties", "dependentSchemas", "dependencies"})
# Keywords that hold values, not schemas. A "$ref" inside them is an ordinary key.
_VALUES: Final = frozenset({"const", "enum", "default", "examples"})
# Keywords that are useless without references.
_DROPPED: Final = frozenset({"definitions", "discriminator"})
_OUTLINE: Final = ("type", "title", "description")

UNIONS: Final = ("anyOf", "oneOf")
#: Used instead of a type name if any type is allowed, or if the schema does not restrict the type.
ANY: Final = "any"

_Value = TypeVar("_Value", bound=JSON)
_NULL: Final = "null"
# Keywords that do not restrict the value.
_NOTES: Final = frozenset({"title", "description", "default", "examples", "deprecated"})
# Keywords from which a missing type is inferred.
_IMPLIED: Final = (
    (
        "object",
        ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
    ),
    ("array", ("items", "prefixItems", "contains", "minItems", "maxItems", "uniqueItems")),
    ("string", ("pattern", "format", "minLength", "maxLength")),
    ("number", ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
)


def inline_references(root: Schema) -> Schema:
    """Return the schema without references and definitions. A reference that cannot be resolved is dropped."""
    left = _MAX_WRITTEN_OUT

    def inline(node: JSON, inside: tuple[str, ...], depth: int) -> JSON:
        """Return a schema, or a list of schemas, without references. `inside`: the references expanded on the path to it."""
        nonlocal left
        if isinstance(node, list):
            return [inline(each, inside, depth) for each in node]
        if not isinstance(node, dict):
            return node
        if depth > _MAX_DEPTH:
            return _outline(node)
        left -= bool(inside)
        target = target_of(node.get("$ref"), inside, depth)
        if target is False:
            return False
        found: Schema = dict(target) if isinstance(target, dict) else {}
        for key, value in node.items():
            if key in _NAMED and isinstance(value, dict):
                found[key] = {name: inline(each, inside, depth + 1) for name, each in value.items()}
            elif key not in _DROPPED and not key.startswith("$"):
                found[key] = value if key in _VALUES else inline(value, inside, depth + 1)
        return found

    def target_of(reference: JSON, inside: tuple[str, ...], depth: int) -> JSON:
        """Return the schema that a reference names; None if there is none. Its keys are merged with those beside the reference."""
        if not isinstance(reference, str):
            return None
        target = _resolve(root, reference)
        if reference in inside or left <= 0:
            return _outline(target) if isinstance(target, dict) else None
        return inline(target, (*inside, reference), depth + 1)

    found = inline(root, (), 0)
    return found if isinstance(found, dict) else {}


def _outline(node: Schema) -> Schema:
    """Return a schema's type, title and description only."""
    found: Schema = {key: node[key] for key in _OUTLINE if key in node}
    if "type" not in found and isinstance(node.get("properties"), dict):
        found["type"] = "object"
    return found


def _resolve(root: Schema, reference: str) -> JSON:
    """Return the value that a reference within the document names; None if it does not exist or is in another document."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found: JSON = root
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(name)] if isinstance(found, list) else found[name] if isinstance(found, dict) else None
        except (LookupError, ValueError):
            return None
    return found


def members(node: Schema, key: str) -> list[Schema]:
    """Return the schemas under `allOf`, `anyOf` or `oneOf`, without the schema `false`, which accepts nothing."""
    found = node.get(key)
    if not isinstance(found, list):
        return []
    return [member if isinstance(member, dict) else {} for member in found if member is not False]


def flatten_unions(node: Schema) -> Schema:
    """Return the schema without null in its unions. A union or allOf with one member is merged into the schema itself.

    Members are flattened too; other nested schemas are not.
    """
    done: set[str] = set()
    for key in ("allOf", *UNIONS):
        if key not in node or key in done:
            continue
        left = [flatten_unions(member) for member in members(node, key)]
        if key in UNIONS:
            left = _drop_null(left)
        rest = {name: value for name, value in node.items() if name != key}
        if len(left) == 1 and _agree(left[0], rest):
            node = {**left[0], **rest}
            done.update(left[0])
        else:
            node = {**rest, key: [*left]} if left else rest
    return node


def kinds(node: Schema) -> list[str]:
    """Return the type names that a flattened schema accepts, in order; null only if it is the only one.

    `number` includes `integer`.
    """
    found = _declared_types(node) or [_kind(value) for value in values(node)]
    if not found:
        found = [kind for key in UNIONS for member in members(node, key) for kind in kinds(member)]
    if not found:
        known = [words for words in map(kinds, members(node, "allOf")) if words != [ANY]]
        found = known[0] if known else [word for word, keys in _IMPLIED if not node.keys().isdisjoint(keys)][:1]
    words = list(dict.fromkeys(found))
    if "number" in words:
        words = [word for word in words if word != "integer"]
    return [word for word in words if word != _NULL] or words or [ANY]


def values(node: Schema) -> list[JSON]:
    """Return the values that a flattened schema lists, null only if it is the only one; empty if it does not list all values."""
    listed = node.get("enum")
    if "const" in node:
        found = [node["const"]]
    elif isinstance(listed, list):
        found = listed
    else:
        unions = [members(node, key) for key in UNIONS if key in node]
        options = [values(member) for member in unions[0]] if unions else []
        found = [value for option in options for value in option] if all(options) else []
    found = distinct(found)
    return [value for value in found if value is not None] or found


def distinct(found: Iterable[_Value]) -> list[_Value]:
    """Return each value once, in order. Raises ValueError for text with lone surrogates, which UTF-8 cannot encode."""
    return list({msgspec.json.encode(value): value for value in found}.values())


def _drop_null(options: Iterable[Schema]) -> list[Schema]:
    """Return the members of a union without null, with nested unions expanded; empty if they accept any value."""
    found: list[Schema] = []
    for option in options:
        inner = [key for key in UNIONS if option.keys() - _NOTES == {key}]
        found += members(option, inner[0]) if inner else [option]
    if any(not option.keys() - _NOTES for option in found):
        return []
    left = [option for option in found if kinds(option) != [_NULL]] or found[:1]
    if any(option.keys() - _NOTES == {"type"} and option["type"] == "number" for option in left):
        left = [option for option in left if kinds(option) != ["integer"]]
    return distinct(left)


def _agree(member: Schema, rest: Schema) -> bool:
    return all(member[key] == rest[key] for key in member.keys() & rest.keys() - _NOTES)


def _declared_types(node: Schema) -> list[str]:
    found = node.get("type")
    words = found if isinstance(found, list) else [found]
    return [word for word in words if isinstance(word, str) and word]


def _kind(value: JSON) -> str:
    match value:
        case bool():
            return "boolean"
        case None:
            return _NULL
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
        case msgspec.Raw():
            return "integer" if bytes(value).lstrip(b"-").isdigit() else "number"

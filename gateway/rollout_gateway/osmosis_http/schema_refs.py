"""JSON Schemas without references: what `$ref` names is put in its place.

A schema that contains itself has no such form, and references to references can multiply without end. So a reference is
written out once on its way down, and references together only up to a bound; beyond that a schema is cut to its outline.
"""

from collections.abc import Iterable
from typing import Final, TypeAlias
from urllib.parse import unquote

import msgspec

# Numbers are the texts they were, in `msgspec.Raw`: they may be larger or more exact than Python holds.
JSON: TypeAlias = "str | bool | msgspec.Raw | list[JSON] | dict[str, JSON] | None"
Schema: TypeAlias = dict[str, JSON]

_MAX_DEPTH: Final = 32
_MAX_WRITTEN_OUT: Final = 5_000

# Which keywords hold schemas. All others hold values, in which "$ref" is a key like any other.
_NAMED: Final = frozenset({"properties", "patternProperties", "dependentSchemas", "dependencies"})
_LISTED: Final = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SINGLE: Final = frozenset(
    {
        "items",
        "additionalItems",
        "unevaluatedItems",
        "contains",
        "additionalProperties",
        "unevaluatedProperties",
        "propertyNames",
        "not",
        "if",
        "then",
        "else",
        "contentSchema",
    }
)
# They only serve references.
_DROPPED: Final = frozenset({"definitions", "discriminator"})
_OUTLINE: Final = ("type", "title", "description")


def inlined(root: Schema) -> Schema:
    """The schema without references and definitions. A reference that leads nowhere says nothing."""
    found = _Inliner(root).schema(root, (), 0)
    return found if isinstance(found, dict) else {}


class _Inliner:
    """Writes the references of one document out."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._left = _MAX_WRITTEN_OUT

    def schema(self, node: JSON, inside: tuple[str, ...], depth: int) -> JSON:
        """A schema, true and false among them. `inside` are the references that led here."""
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            return {}
        if depth > _MAX_DEPTH:
            return _outline(node)
        self._left -= bool(inside)
        found = self._target(node, inside, depth)
        if found is False:
            return False
        written = dict(found) if isinstance(found, dict) else {}
        for key, value in node.items():
            if key not in _DROPPED and not key.startswith("$"):
                written[key] = self._keyword(key, value, inside, depth + 1)
        return written

    def _target(self, node: Schema, inside: tuple[str, ...], depth: int) -> JSON:
        reference = node.get("$ref")
        if not isinstance(reference, str):
            return {}
        target = _resolved(self._root, reference)
        if reference in inside or self._left <= 0:
            return _outline(target) if isinstance(target, dict) else {}
        return self.schema(target, (*inside, reference), depth + 1)

    def _keyword(self, key: str, value: JSON, inside: tuple[str, ...], depth: int) -> JSON:
        if key in _NAMED and isinstance(value, dict):
            # `dependencies` also knows lists of names.
            return {
                name: each if isinstance(each, list) else self.schema(each, inside, depth)
                for name, each in value.items()
            }
        if key in _LISTED and isinstance(value, list):
            return self._list(value, inside, depth)
        if key in _SINGLE:
            # `items` was a list once.
            return self._list(value, inside, depth) if isinstance(value, list) else self.schema(value, inside, depth)
        return value

    def _list(self, nodes: Iterable[JSON], inside: tuple[str, ...], depth: int) -> list[JSON]:
        return [self.schema(node, inside, depth) for node in nodes]


def _outline(node: Schema) -> Schema:
    """What can be said of a schema without looking into it."""
    found: Schema = {key: node[key] for key in _OUTLINE if key in node}
    if "type" not in found and isinstance(node.get("properties"), dict):
        found["type"] = "object"
    return found


def _resolved(root: Schema, reference: str) -> JSON:
    """What a reference within the document names; None where it leads nowhere or out of it."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found: JSON = root
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif (
            isinstance(found, list) and name.isdecimal() and name.isascii() and len(name) < 9 and int(name) < len(found)
        ):
            found = found[int(name)]
        else:
            return None
    return found

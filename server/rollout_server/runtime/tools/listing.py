"""Checks the list of tools that a toolset sends. The list is hostile input: it ends up in prompts, logs and names of metrics."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Final

from rollout_server.core.message import JSON, MalformedMessage, parse_json
from rollout_server.runtime.ports import Tool
from rollout_server.runtime.tools.protocols import ToolFailed
from rollout_server.runtime.tools.toolset import ListedTool, McpServer

NAME: Final = re.compile(r"[A-Za-z0-9_./-]{1,128}")
"""Names of tools, as in the Model Context Protocol."""
_DEEPEST: Final = 64
_LONG: Final = 64 * 1024
_SHOWN: Final = 100
_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")


@dataclass(frozen=True, slots=True)
class ListingLimits:
    """Limits of one toolset's list: number of tools that are offered, and bytes of their names, descriptions and schemas."""

    tools: int = 256
    bytes: int = 1024 * 1024


async def checked_listing(
    listed: Sequence[ListedTool], include: Sequence[str] | None, limits: ListingLimits
) -> tuple[ListedTool, ...]:
    """Return the tools to offer: all, or those that `include` names, in its order. Raise `ToolFailed` for a list that is wrong."""
    chosen = listed if include is None else _included(listed, include)
    if len(chosen) > limits.tools:
        text = f"it lists {len(chosen):,} tools, at most {limits.tools} are offered; an agent chooses some with include"
        raise ToolFailed(text)
    if sum(len(each.parameters_json_schema) for each in chosen) > _LONG:
        await asyncio.to_thread(_check, chosen, limits)  # the event loop must not wait for it
    else:
        _check(chosen, limits)
    return tuple(chosen)


def _check(chosen: Sequence[ListedTool], limits: ListingLimits) -> None:
    size = 0
    names: set[str] = set()
    for each in chosen:
        _check_name(each.name)
        if each.name in names:
            raise ToolFailed(f"it lists two tools with the name {each.name!r}")
        names.add(each.name)
        try:
            size += sum(len(text.encode()) for text in (each.name, each.description, each.parameters_json_schema))
        except UnicodeEncodeError:
            raise ToolFailed(
                f"the text of tool {each.name!r} has a lone surrogate, which UTF-8 cannot encode"
            ) from None
        if size > limits.bytes:
            raise ToolFailed(
                f"its list of tools has more than {limits.bytes} bytes; an agent chooses some with include"
            )
        _check_schema(each)


def listing_digest(tools: Iterable[ListedTool]) -> str:
    """Return the SHA-256 of a list, in hexadecimal."""
    return hashlib.sha256(json.dumps([astuple(each) for each in tools]).encode()).hexdigest()


def check_names(tools: Sequence[Tool], where: str) -> None:
    """Raise ValueError if two tools have the same name. The text says of both where they come from."""
    found: dict[str, Tool] = {}
    for each in tools:
        if (other := found.get(each.name)) is not None:
            raise ValueError(
                f"{where}: two tools have the name {each.name!r}: one of {_origin(other)}, one of {_origin(each)}"
            )
        found[each.name] = each


def _origin(tool: Tool) -> str:
    source = getattr(tool, "source", None)
    if source is not None:
        whose = "the agent" if isinstance(source, McpServer) else "the request"
        return f"{whose}'s toolset {source}"
    definition = getattr(tool, "definition", None)
    return f"the agent ({definition})" if definition is not None else "the agent"


def _included(listed: Sequence[ListedTool], include: Sequence[str]) -> Sequence[ListedTool]:
    by_name = {each.name: each for each in listed}
    missing = [name for name in include if name not in by_name]
    if missing:
        shown = ", ".join(repr(name[:_SHOWN]) for name in list(by_name)[:20])
        raise ToolFailed(f"it has no tool {missing[0]!r}, which include names; it has {shown or 'none'}")
    return [by_name[name] for name in include]


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        text = f"it lists a tool with the name {name[:_SHOWN]!r}; a name has 1 to 128 letters, digits, '_', '-', '.' and '/'"
        raise ToolFailed(text)


def _check_schema(tool: ListedTool) -> None:
    """Check that the schema describes an object, is not too deep, and refers to nothing outside of itself."""
    try:
        schema = parse_json(tool.parameters_json_schema)
    except MalformedMessage as error:
        raise ToolFailed(f"the schema of tool {tool.name!r} is not JSON: {error}") from None
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise ToolFailed(f"the schema of tool {tool.name!r} does not describe an object: its type must be 'object'")
    required = schema.get("required", [])
    names = required if isinstance(required, list) else [None]
    if not isinstance(schema.get("properties", {}), dict) or not all(isinstance(name, str) for name in names):
        raise ToolFailed(f"the schema of tool {tool.name!r} needs an object as `properties` and names as `required`")
    try:
        json.dumps(schema, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):  # an infinite number, half of a surrogate pair, or too many levels
        raise ToolFailed(f"the schema of tool {tool.name!r} has a value that JSON cannot express") from None
    level: list[JSON] = [schema]
    for _ in range(_DEEPEST):
        level = [inner for value in level for inner in _parts(value, tool.name)]
        if not level:
            return
    raise ToolFailed(f"the schema of tool {tool.name!r} has more than {_DEEPEST} levels")


def _parts(value: JSON, name: str) -> Iterable[JSON]:
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        return ()
    references = (value.get(name) for name in _REFERENCES)
    reference = next((each for each in references if isinstance(each, str) and not each.startswith("#")), None)
    if reference is not None:
        raise ToolFailed(
            f"the schema of tool {name!r} refers to {reference[:_SHOWN]!r}; only references inside it are allowed"
        )
    return value.values()

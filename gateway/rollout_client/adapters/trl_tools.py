"""Tools of a rollout server as an environment of TRL. There TRL owns the loop, renders and masks; only the tools are ours."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import operator
import uuid
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Final, Literal, Protocol

_TYPES: Final[Mapping[str, Any]] = {
    "integer": int,
    "number": float,
    "string": str,
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": None,
}
_RESERVED: Final = ("reset", "get_reward", "state", "metadata")


class ServerTool(Protocol):
    """A tool as `@rollout_server.tool` makes it."""

    name: str
    description: str
    parameters_json_schema: str

    async def run(self, arguments: Mapping[str, Any], context: Any) -> Any:
        """Run one call with validated arguments."""


class ToolEnvironment:
    """State of one rollout. TRL creates it once and resets it before each rollout.

    Attributes:
        metadata: the columns of the row, except the prompt.
        state: the data of the tools, as `context.state`. Reward functions read it in `environments`.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self, **row: Any) -> None:
        """Begin a rollout with the columns of a row."""
        self.metadata = {name: value for name, value in row.items() if name != "prompt"}
        self.state: dict[str, Any] = {}
        self._uid = uuid.uuid4().hex


def tool_environment(*tools: ServerTool) -> type[ToolEnvironment]:
    """Return an `environment_factory` for TRL's GRPOTrainer with tools, such as `tool_environment(*MyAgent.tools)`.

    Each tool becomes a method, whose type hints and docstring are those of the tool's schema, because TRL derives the schema for
    the model from them. Arguments are validated as on the server. A parameter annotated `ToolContext` gets `uid`, `rollout_id`,
    `metadata`, `state`, `cancelled` and `logger`. Everything else of the server is missing: limits, retries and truncation.

    Raises TypeError for a name with another meaning: "reset" and "get_reward" of TRL, "state" and "metadata" of this class, and
    names that begin with "_".
    """
    methods: dict[str, Any] = {}
    for each in tools:
        if each.name in _RESERVED or each.name.startswith("_") or each.name in methods:
            raise TypeError(f"the tool's name {each.name!r} is reserved for environments, or there are two of it")
        methods[each.name] = _method(each)
    return type("ToolEnvironment", (ToolEnvironment,), methods)


def _method(tool: ServerTool) -> Any:
    schema = json.loads(tool.parameters_json_schema)
    properties, required = schema.get("properties", {}), schema.get("required", ())
    hints = {name: _hint(each, schema.get("$defs", {})) for name, each in properties.items()}

    async def call(self: ToolEnvironment, /, **arguments: Any) -> Any:
        context = SimpleNamespace(
            uid=self._uid,
            rollout_id=self._uid,
            metadata=self.metadata,
            state=self.state,
            cancelled=False,
            logger=logging.getLogger(__name__),
        )
        content = await tool.run(arguments, context)
        if not isinstance(content, str):
            raise TypeError(f"the tool {tool.name!r} returned an image, which this environment cannot pass to TRL")
        return content

    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if name in required else properties[name].get("default"),
            annotation=hint,
        )
        for name, hint in hints.items()
    ]
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    call.__signature__ = inspect.Signature([itself, *parameters])  # type: ignore[attr-defined]
    call.__annotations__ = hints
    call.__name__, call.__qualname__ = tool.name, f"ToolEnvironment.{tool.name}"
    lines = [
        f"    {name}: {' '.join(str(each.get('description') or name).split())}" for name, each in properties.items()
    ]
    call.__doc__ = "\n".join([tool.description or tool.name, *(["", "Args:", *lines] if lines else ())])
    return call


def _hint(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Any:
    """Return the type hint of a JSON Schema. What hints cannot say, such as the fields of an object, the tool itself validates."""
    if "$ref" in schema:
        found = definitions.get(str(schema["$ref"]).rpartition("/")[2], {})
        return dict if "enum" not in found else _hint(found, {})
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else ())
    if values:
        return Literal[tuple(values)]
    kinds = schema.get("type", "object")
    options = schema.get("anyOf") or schema.get("oneOf") or [{**schema, "type": kind} for kind in _listed(kinds)]
    return functools.reduce(operator.or_, (_simple_hint(each, definitions) for each in options))


def _simple_hint(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Any:
    if "type" not in schema or "enum" in schema or "const" in schema:
        return _hint(schema, definitions)
    if schema["type"] == "array" and schema.get("items"):
        return list[_hint(schema["items"], definitions)]  # type: ignore[misc]
    return _TYPES.get(schema["type"], dict)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]

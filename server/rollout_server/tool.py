"""Tools: functions that a model may call.

A tool's parameters are its function's annotations. They are told to the model as JSON Schema in the plain shape that function
tools have, and arguments are checked strictly against them: "5" is no number, and neither is true.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, ParamSpec, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError
from pydantic_core import ErrorDetails, to_jsonable_python

from rollout_server.core.message import JSON
from rollout_server.runtime.port import ArgumentError, ToolError

P = ParamSpec("P")
R = TypeVar("R")

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_COMPLAINTS, _SHOWN = 5, 60
_SHOULD_BE = "Input should be "


@dataclass(frozen=True, slots=True, eq=False)
class FunctionTool(Generic[P, R]):
    """A tool made of a function, which it still is: calling it calls the function, unchecked.

    Args:
        name: the function's name.
        description: the text of its docstring.
        parameters_json_schema: JSON Schema of the arguments object, as JSON text.
        function: what runs: a coroutine function on the event loop, any other in a thread.
    """

    name: str
    description: str
    parameters_json_schema: str
    function: Callable[P, R] = field(repr=False)
    _arguments: TypeAdapter[dict[str, object]] = field(repr=False)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function itself."""
        return self.function(*args, **kwargs)

    async def run(self, arguments: Mapping[str, JSON]) -> str:
        """Runs one call. Raises `ArgumentError` for wrong arguments, `ToolError` for a result that cannot be written."""
        bound = self._bind(arguments)
        function = cast("Callable[..., object]", self.function)
        if inspect.iscoroutinefunction(function):
            result = await function(**bound)
        else:
            result = await asyncio.to_thread(_call, function, bound)
        if inspect.isawaitable(result):
            result = await result
        return self._written(result)

    def _bind(self, arguments: Mapping[str, JSON]) -> dict[str, object]:
        # Checked as JSON, not as Python values: there strict still lets an object be a model, and a text a date.
        try:
            return self._arguments.validate_json(json.dumps(dict(arguments), allow_nan=False), strict=True)
        except ValidationError as error:
            raise ArgumentError(_complaints(error, arguments)) from None
        except RecursionError:
            raise ArgumentError("nested too deeply") from None
        except ValueError:
            raise ArgumentError("a number is not finite, or has too many digits") from None

    def _written(self, result: object) -> str:
        try:
            return written(result)
        except (ValueError, TypeError, RecursionError) as error:
            why = "too many digits" if isinstance(result, int) else _one_line(str(error))
            raise ToolError(f"The result of {self.name} cannot be written: {why}") from None


def tool(function: Callable[P, R]) -> FunctionTool[P, R]:
    """Makes a tool of a coroutine function or of a plain one. Raises TypeError for a function that cannot be one.

    A parameter is described to the model by a text in its annotation, `Annotated[int | float, "First number"]`, or by
    pydantic's `Field(description=...)`.
    """
    if isinstance(function, FunctionTool):
        return function
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        raise TypeError(f"a tool is made of a function, not of {function!r}")
    name = function.__name__
    if not _NAME.fullmatch(name):
        raise TypeError(f"tool {name!r}: a name has 1 to 64 letters, digits, _ or -")
    try:
        arguments, schema = _parameters(function)
    except (PydanticUserError, PydanticUndefinedAnnotation, NameError, TypeError, ValueError) as error:
        raise TypeError(f"tool {name!r}: {error}") from error
    return FunctionTool(name, inspect.getdoc(function) or "", schema, function, arguments)


def written(result: object) -> str:
    """What a model reads of a result: a text as it is, a number plainly, everything else as JSON.

    Raises ValueError, TypeError or RecursionError for what cannot be written, an infinite number among them.
    """
    match result:
        case str():
            return str.__str__(result)
        case bool() | None:
            return json.dumps(result)
        case int():
            return int.__repr__(result)
        case float():
            if not math.isfinite(result):
                raise ValueError(f"{result} is not a finite number")
            return float.__repr__(result)
        case _:
            return json.dumps(to_jsonable_python(result), ensure_ascii=False, allow_nan=False)


def _call(function: Callable[..., object], arguments: dict[str, object]) -> object:
    """Runs in a thread. A StopIteration cannot be set on a future: whoever waits for it would wait for ever."""
    try:
        return function(**arguments)
    except StopIteration as error:
        raise RuntimeError("StopIteration") from error


def _parameters(function: Callable[..., object]) -> tuple[TypeAdapter[dict[str, object]], str]:
    """What checks the arguments of a function, and their schema as JSON text."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in named:
            raise TypeError(f"parameter {parameter} cannot be given by name")
        if parameter.annotation is inspect.Parameter.empty:
            raise TypeError(f"parameter {parameter} needs a type")

    def collect(**arguments: object) -> dict[str, object]:
        return arguments

    functools.update_wrapper(collect, function)
    collect.__annotations__ = {name: hint for name, hint in collect.__annotations__.items() if name != "return"}
    hints = typing.get_type_hints(collect, include_extras=True)
    adapter = TypeAdapter(cast("type[dict[str, object]]", collect))
    raw = adapter.json_schema()
    for name, shape in raw.get("properties", {}).items():
        texts = [extra for extra in getattr(hints[name], "__metadata__", ()) if isinstance(extra, str)]
        if texts:
            shape.setdefault("description", texts[0])
    return adapter, json.dumps(_plain(raw, raw.get("$defs", {}), ()), ensure_ascii=False, allow_nan=False)


_DROPPED = ("title", "$defs", "$ref", "anyOf", "oneOf", "const", "discriminator")
_IMPLIED = (("additionalProperties", False), ("additionalProperties", True), ("default", None))
_VERBATIM = ("default", "enum", "examples", "required")
_ORDER = ("type", "description", "enum", "items", "properties", "required")
# Pydantic's own words for bounds that it puts on a union as a whole.
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def _plain(node: Mapping[str, JSON], defs: Mapping[str, Mapping[str, JSON]], inside: Sequence[str]) -> dict[str, JSON]:
    """A schema in the shape of function tools: references inlined, nullable and number unions flattened, no titles."""
    shaped: dict[str, JSON] = {}
    reference = node.get("$ref")
    if isinstance(reference, str):
        name = reference.removeprefix("#/$defs/")
        if name in inside:
            raise TypeError(f"the type {name} contains itself, which cannot be written without references")
        shaped = _plain(defs[name], defs, (*inside, name))
    options = node.get("anyOf") or node.get("oneOf")
    if isinstance(options, list):
        shaped |= _united([_plain(option, defs, inside) for option in options])
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
        return {name: _plain(shape, defs, inside) for name, shape in value.items()}
    if isinstance(value, dict):
        return _plain(value, defs, inside)
    if isinstance(value, list):
        return [_plain(item, defs, inside) if isinstance(item, dict) else item for item in value]
    return value


def _united(options: list[dict[str, JSON]]) -> dict[str, JSON]:
    left = [option for option in options if option != {"type": "null"}]
    if {"type": "number"} in left:
        left = [option for option in left if option != {"type": "integer"}]
    return left[0] if len(left) == 1 else {"anyOf": left}


def _complaints(error: ValidationError, arguments: Mapping[str, JSON]) -> str:
    """What is wrong with arguments, in one line that names each field."""
    places: dict[str, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False, include_context=False):
        places.setdefault(_path(detail, arguments), []).append(detail)
    found = [f"{path}: {_complaint(details)}" if path else _complaint(details) for path, details in places.items()]
    more = [f"and {len(found) - _COMPLAINTS} more"] if len(found) > _COMPLAINTS else []
    return "; ".join(found[:_COMPLAINTS] + more)


def _complaint(details: Sequence[ErrorDetails]) -> str:
    """What is wrong at one place; the members of a union complain one by one."""
    if details[0]["type"].startswith("missing"):
        return "missing"
    if details[0]["type"] == "unexpected_keyword_argument":
        return "unknown parameter"
    texts = list(dict.fromkeys(_one_line(detail["msg"]) for detail in details))
    if not all(text.startswith(_SHOULD_BE) for text in texts):
        return " or ".join(texts)
    return f"must be {' or '.join(text.removeprefix(_SHOULD_BE) for text in texts)}, not {_shown(details[0]['input'])}"


def _path(detail: ErrorDetails, arguments: JSON) -> str:
    """Where in the arguments an error is. Pydantic's location also names the members of unions, which no model wrote."""
    path, value = "", arguments
    missing = len(detail["loc"]) if detail["type"].startswith("missing") else 0
    for index, key in enumerate(detail["loc"], start=1):
        if isinstance(value, list) and isinstance(key, int):
            path, value = f"{path}[{key}]", value[key] if key < len(value) else None
        elif isinstance(value, Mapping) and isinstance(key, str) and (key in value or index == missing):
            name = key if key.isidentifier() else f"[{_shown(key)}]"
            path, value = f"{path}.{name}" if path else name, value.get(key)
    return path


def _shown(value: object) -> str:
    text = _one_line(json.dumps(value, ensure_ascii=False, default=repr))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _one_line(text: str) -> str:
    return " ".join(text.split())

"""A function's parameters: their JSON Schema, the validation of arguments, and those that get the rollout."""

from __future__ import annotations

import functools
import inspect
import json
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError, PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import SchemaError, to_jsonable_python

from rollout_server.core.message import JSON
from rollout_server.runtime.errors import ArgumentError
from rollout_server.runtime.run.run import Run
from rollout_server.runtime.tools.protocols import ToolContext
from rollout_server.tool.argument_errors import argument_errors, one_line
from rollout_server.tool.schema import plain_schema

_CONFIG = ConfigDict(allow_inf_nan=False)  # else an integer with more digits than a float can have becomes infinite
_PLAIN = (str, int, float, list, tuple, dict, set, FieldInfo)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Parameters:
    """Validates arguments.

    Attributes:
        json_schema: the schema that the model sees, as JSON text.
        context: names of the parameters that get the calling rollout. The schema does not have them.
    """

    def __init__(self, function: Callable[..., object], descriptions: Mapping[str, str]) -> None:
        """Build the schema and the validator. `descriptions`, by parameter, are used where an annotation has none.

        Raises TypeError, ValueError or one of pydantic's errors if the function cannot be a tool.
        """
        _check_signature(function)

        # Pydantic validates calls by signature. `collect` has the tool's signature, but returns the validated arguments
        # instead of running the tool.
        def collect(**arguments: object) -> dict[str, object]:
            return arguments

        functools.update_wrapper(collect, function)
        collect.__annotations__ = {name: hint for name, hint in collect.__annotations__.items() if name != "return"}
        hints: Mapping[str, Any] = {name: _with_fields(hint) for name, hint in _hints(collect).items()}
        collect.__annotations__ = dict(hints)
        self.context = tuple(name for name, hint in hints.items() if _is_context(hint))
        if self.context:
            hints = _hide(collect, hints, self.context)
        try:
            self._adapter = TypeAdapter(cast("type[dict[str, object]]", collect), config=_CONFIG)
            raw = self._adapter.json_schema(schema_generator=_Schema)
        except (PydanticUserError, SchemaError, TypeError):
            _name_culprit(hints)
            raise
        self._check_defaults(function, raw.get("properties", {}))
        self.json_schema = _schema_json(raw, descriptions)

    def bind(self, arguments: Mapping[str, JSON]) -> dict[str, object]:
        """Return the validated arguments, converted to the annotated types. Raises `ArgumentError`."""
        try:
            return self._bound(arguments)
        except ValidationError as error:
            raise ArgumentError(argument_errors(error, arguments)) from None
        except RecursionError:
            raise ArgumentError("nested too deeply") from None
        except ValueError:
            raise ArgumentError("a number is not finite, or has too many digits") from None

    def _bound(self, arguments: Mapping[str, JSON]) -> dict[str, object]:
        # JSON text instead of Python values: only for JSON does strict mode accept an object as a model and a string as a date.
        return self._adapter.validate_json(json.dumps(dict(arguments), allow_nan=False), strict=True)

    def _check_defaults(self, function: Callable[..., object], properties: Mapping[str, Any]) -> None:
        """Check that each default in the schema is a valid argument, because the model may send it.

        None is not in the schema and may be the default of any type.
        """
        defaults = {parameter.name: parameter.default for parameter in inspect.signature(function).parameters.values()}
        for name, shape in properties.items():
            default = shape.get("default")
            found = self._default_error(name, default) if default is not None else ""
            if found and isinstance(defaults.get(name), _PLAIN):
                raise TypeError(f"the default of parameter {found}")
            if found:  # an object whose serialised form is not a valid input: no error, but the model must not see it
                del shape["default"]

    def _default_error(self, name: str, value: JSON) -> str:
        try:
            self._bound({name: value})
        except ValidationError as error:
            return argument_errors(error, {name: value}, of=name)
        except ValueError as error:
            return f"{name}: {error}"
        return ""


class _Schema(GenerateJsonSchema):
    """Refuses types that pydantic would not validate before the function reads them."""

    def generator_schema(self, schema: Any) -> NoReturn:
        raise TypeError("the items of an Iterable are not validated up front; use list[...] or Sequence[...]")

    def is_subclass_schema(self, schema: Any) -> NoReturn:
        raise TypeError("a class cannot be written in JSON; use an enum or a Literal of names")

    def enum_schema(self, schema: Any) -> JsonSchemaValue:
        # Pydantic compares arguments with the values: what the model sees of a tuple is a list, which is not equal to it.
        other = [each for each in schema["members"] if to_jsonable_python(each.value) != each.value]
        if other and "missing" not in schema:
            raise TypeError(
                f"the value of {other[0]} cannot be written in JSON; use texts or numbers as values of the enum"
            )
        return super().enum_schema(schema)


def _check_signature(function: Callable[..., object]) -> None:
    for index, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.kind not in _NAMED:
            raise TypeError(
                f"parameter {parameter} cannot be passed by name; remove it or make it an ordinary parameter"
            )
        if parameter.annotation is not inspect.Parameter.empty:
            continue
        if index == 0 and parameter.name in ("self", "cls"):
            name = getattr(function, "__name__", "")
            raise TypeError(
                f"it is a method, and there is no object yet; make it in __init__: self.tools = [tool(self.{name})]"
            )
        raise TypeError(f"parameter {parameter} needs a type annotation")


def _hints(function: Callable[..., object]) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(
            f"{error}: annotations are evaluated at module level; define or import the name there"
        ) from None
    except (SyntaxError, AttributeError) as error:
        raise TypeError(f"its annotations cannot be evaluated: {error}") from None


def _is_context(hint: object) -> bool:
    """Return whether a parameter of this type gets the rollout: `Run`, `ToolContext`, or one of them or None."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _is_context(typing.get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        return all(_is_context(each) for each in typing.get_args(hint) if each is not type(None))
    return hint is Run or hint is ToolContext


def _hide(function: Callable[..., object], hints: Mapping[str, Any], hidden: Collection[str]) -> Mapping[str, Any]:
    """Remove parameters from a function's signature and annotations. Return the type hints of the others."""
    signature = inspect.signature(function)
    shown = [parameter for name, parameter in signature.parameters.items() if name not in hidden]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    function.__annotations__ = {name: hint for name, hint in function.__annotations__.items() if name not in hidden}
    return {name: hint for name, hint in hints.items() if name not in hidden}


def _name_culprit(hints: Mapping[str, Any]) -> None:
    """Raise TypeError for the first parameter whose type has no JSON Schema."""
    for name, hint in hints.items():
        try:
            TypeAdapter(hint).json_schema(schema_generator=_Schema)
        except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema):
            kind = inspect.formatannotation(hint)
            what = "use strings, numbers, lists, dictionaries, dataclasses or pydantic models"
            raise TypeError(f"parameter {name}: {kind} has no JSON Schema; {what}") from None
        except PydanticUserError as error:
            raise TypeError(f"parameter {name}: {one_line(error.message)}") from None
        except SchemaError as error:  # such as a pattern that pydantic's regular expressions do not support
            why = str(error).rpartition("\n")[2].strip().removeprefix("error: ")
            raise TypeError(f"parameter {name}: its type cannot be validated: {why}") from None
        except TypeError as error:
            raise TypeError(f"parameter {name}: {error}") from None


def _with_fields(hint: Any) -> Any:
    """Return a type whose texts in `Annotated`, at any depth, are descriptions that pydantic knows."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        texts = [Field(description=text) for text in hint.__metadata__ if isinstance(text, str)]
        return typing.Annotated[(_with_fields(inner[0]), *texts[:1], *hint.__metadata__)]
    found = tuple(_with_fields(each) for each in inner)
    if origin is None or found == inner:
        return hint
    generic: Any = typing.Union if origin is types.UnionType else origin
    return generic[found]


def _schema_json(raw: dict[str, Any], descriptions: Mapping[str, str]) -> str:
    raw.pop("additionalProperties", None)  # not usual in function tools; `bind` reports unknown parameters anyway
    for name, shape in raw.get("properties", {}).items():
        options = [each for each in shape.get("anyOf", ()) if each != {"type": "null"}]
        if name in descriptions and not (len(options) == 1 and "description" in options[0]):
            shape.setdefault("description", descriptions[name])
    return json.dumps(plain_schema(raw, raw.get("$defs", {}), ()), ensure_ascii=False, allow_nan=False)

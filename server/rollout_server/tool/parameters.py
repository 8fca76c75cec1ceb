"""A function's parameters: their schema, and the check of arguments against it."""

from __future__ import annotations

import functools
import inspect
import json
import typing
from collections.abc import Callable, Mapping
from typing import cast

from pydantic import TypeAdapter, ValidationError

from rollout_server.core.message import JSON
from rollout_server.runtime.port import ArgumentError
from rollout_server.tool.complaints import complaints
from rollout_server.tool.schema import plain


class Parameters:
    """Checks arguments. `json_schema` is what the model is told of them, as JSON text."""

    def __init__(self, function: Callable[..., object], described: Mapping[str, str]) -> None:
        """`described` are the parameters in words, where their annotations say nothing.

        Raises TypeError, ValueError, NameError or pydantic's errors for a function that cannot be a tool.
        """
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
        self._adapter = TypeAdapter(cast("type[dict[str, object]]", collect))
        self.json_schema = self._written(typing.get_type_hints(collect, include_extras=True), described)

    def bind(self, arguments: Mapping[str, JSON]) -> dict[str, object]:
        """The arguments as the function wants them. Raises `ArgumentError`."""
        # Checked as JSON, not as Python values: there strict still lets an object be a model, and a text a date.
        try:
            return self._adapter.validate_json(json.dumps(dict(arguments), allow_nan=False), strict=True)
        except ValidationError as error:
            raise ArgumentError(complaints(error, arguments)) from None
        except RecursionError:
            raise ArgumentError("nested too deeply") from None
        except ValueError:
            raise ArgumentError("a number is not finite, or has too many digits") from None

    def _written(self, hints: Mapping[str, object], described: Mapping[str, str]) -> str:
        raw = self._adapter.json_schema()
        raw.pop("additionalProperties", None)  # function tools do not say it; an unknown parameter is told of as such
        for name, shape in raw.get("properties", {}).items():
            texts = [extra for extra in getattr(hints[name], "__metadata__", ()) if isinstance(extra, str)]
            if texts or name in described:
                shape.setdefault("description", texts[0] if texts else described[name])
        return json.dumps(plain(raw, raw.get("$defs", {}), ()), ensure_ascii=False, allow_nan=False)

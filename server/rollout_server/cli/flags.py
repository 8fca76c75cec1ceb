"""Flags as fields: a command that takes many of them takes them as dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from typing import Any, TypeVar, get_type_hints

_T = TypeVar("_T")
_Command = TypeVar("_Command", bound=Callable[..., None])


def takes(*kinds: type[Any]) -> Callable[[_Command], _Command]:
    """A command that takes the fields of these dataclasses as keywords: typer reads flags off a function's parameters."""

    def marked(command: _Command) -> _Command:
        command.__dict__["__signature__"] = Signature([each for kind in kinds for each in _parameters(kind)])
        return command

    return marked


def taken(kind: type[_T], given: Mapping[str, Any]) -> _T:
    """One of these dataclasses, of what a command was given."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in given.items() if name in names})


def _parameters(kind: type[Any]) -> list[Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    defaults = {field.name: Parameter.empty if field.default is MISSING else field.default for field in fields(kind)}
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=hints[name], default=default)
        for name, default in defaults.items()
    ]

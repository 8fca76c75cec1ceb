"""The routes of the gateway, which thousands of tests would analyse again when they start a server."""

from __future__ import annotations

from dataclasses import fields, replace
from importlib.util import find_spec
from types import FunctionType
from typing import Annotated, Any, get_origin

import pytest


def share_signatures(patch: pytest.MonkeyPatch) -> None:
    """FastAPI analyses the parameters of each path and function of the gateway once per process.

    Each server has routes of its own, whose functions are created again from the same code. To analyse them takes half of the
    CPU of a server's start, because pydantic builds a validator for each parameter.
    """
    if find_spec("fastapi") is None:
        return
    from fastapi import routing
    from fastapi.dependencies import utils
    from fastapi.dependencies.models import Dependant

    analyse, found = utils.get_dependant, dict[Any, Dependant]()
    lists = [field.name for field in fields(Dependant) if field.default_factory is list]

    def shared(*, path: str, call: Any, **options: Any) -> Dependant:
        if not isinstance(call, FunctionType) or not call.__module__.startswith("rollout_gateway."):
            return analyse(path=path, call=call, **options)
        # What the result depends on. `found` keeps the first function, and with it the objects that have these ids.
        key = (
            path,
            call.__code__,
            id(call.__globals__),
            *map(id, call.__defaults__ or ()),
            *((name, id(value)) for name, value in (call.__kwdefaults__ or {}).items()),
            *((name, _identity(value)) for name, value in call.__annotations__.items()),
            repr(options),
        )
        if key not in found:
            found[key] = analyse(path=path, call=call, **options)
        known = found[key]
        # FastAPI adds the dependencies of a route to the lists.
        own: dict[str, Any] = {name: list(getattr(known, name)) for name in lists}
        return replace(known, call=call, **own)

    patch.setattr(utils, "get_dependant", shared)
    patch.setattr(routing, "get_dependant", shared)


def _identity(annotation: Any) -> str | int:
    # `Annotated[...]` is evaluated again with each function; its text names the type and all parameters.
    return repr(annotation) if isinstance(annotation, str) or get_origin(annotation) is Annotated else id(annotation)

"""Work that thousands of tests would repeat when they start a server or a client, done once per process instead."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from importlib.util import find_spec
from types import CodeType
from typing import Any

import pytest


def share_authorities(patch: pytest.MonkeyPatch) -> None:
    """HTTP clients with default settings share one TLS context.

    Each of them would read the 150 certificates of authorities, 0.1 s of CPU, also if it never opens a TLS connection.
    """
    if find_spec("httpx") is None:
        return
    from httpx._transports import default

    create, made = default.create_ssl_context, dict[tuple[str | None, ...], Any]()

    def shared(verify: Any = True, cert: Any = None, trust_env: bool = True) -> Any:
        if verify is not True or cert is not None:
            return create(verify=verify, cert=cert, trust_env=trust_env)
        key = tuple(os.environ.get(name) if trust_env else None for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"))
        if key not in made:
            made[key] = create(verify=verify, cert=cert, trust_env=trust_env)
        return made[key]

    patch.setattr(default, "create_ssl_context", shared)


def analyse_routes_once(patch: pytest.MonkeyPatch) -> None:
    """FastAPI analyses the parameters of a route's function once, although each gateway has a closure of its own.

    It builds a validator for every parameter of 72 routes, two thirds of the CPU of a gateway's start. A function with the same
    code has the same parameters if its annotations and defaults are equal too, dependencies included.
    """
    if find_spec("fastapi") is None:
        return
    from fastapi import routing

    analyse = routing.get_dependant
    known: dict[tuple[str, CodeType, str], tuple[Any, Any]] = {}

    def once(*, path: str, call: Callable[..., Any], scope: Any) -> Any:
        code = getattr(call, "__code__", None)
        if code is None:
            return analyse(path=path, call=call, scope=scope)
        key = (path, code, scope)
        promised = (call.__annotations__, call.__defaults__, call.__kwdefaults__)  # type: ignore[attr-defined]
        if key not in known or known[key][0] != promised:
            known[key] = promised, analyse(path=path, call=call, scope=scope)
        own = copy.copy(known[key][1])
        own.call = call
        # FastAPI puts the dependencies of the route in front of those of the function.
        own.dependencies = [*own.dependencies]
        return own

    patch.setattr(routing, "get_dependant", once)

"""The attacks: functions in the modules of this package, registered by `@attack`.

An attack takes its own `Target` and returns a short description of the server's response. It raises AssertionError if the
server must not respond that way.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tests.hostile.target import Target

Run: TypeAlias = Callable[[Target], Awaitable[str]]


@dataclass(frozen=True)
class Attack:
    """An attack, and the server settings that it needs."""

    name: str
    run: Run
    settings: Mapping[str, str]


ATTACKS: list[Attack] = []


def attack(name: str, **settings: str) -> Callable[[Run], Run]:
    """Register a function as an attack."""

    def registered(run: Run) -> Run:
        ATTACKS.append(Attack(name, run, settings))
        return run

    return registered


def all_attacks() -> list[Attack]:
    """The attacks of all modules in this package."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return ATTACKS

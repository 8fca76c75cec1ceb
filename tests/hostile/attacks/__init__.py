"""The attacks: functions in the modules of this package, each registered by `@attack`.

An attack takes a `Target` of its own and returns what the server answered, in a few words. It raises AssertionError where the
answer is one that the server must not give.
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
    """An attack, and the settings of the server that it is for."""

    name: str
    run: Run
    settings: Mapping[str, str]


ATTACKS: list[Attack] = []


def attack(name: str, **settings: str) -> Callable[[Run], Run]:
    """Registers a function."""

    def registered(run: Run) -> Run:
        ATTACKS.append(Attack(name, run, settings))
        return run

    return registered


def all_attacks() -> list[Attack]:
    """The attacks of all modules here."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return ATTACKS

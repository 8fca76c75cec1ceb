"""Types of setting values, with their parsers, and the error for values that cannot be used."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, BeforeValidator
from pydantic_settings import NoDecode

TOY = "toy"
"""In place of a tokenizer's directory: the toy tokenizer that this package contains."""


class WrongSettings(ValueError):
    """Settings that cannot be used. The text names each by its environment names."""


def env_names(*names: str) -> AliasChoices:
    """Return the environment names of a setting, this project's first."""
    return AliasChoices(*names)


def _pairs(value: object) -> object:
    """Parse `NAME=PATH,NAME=PATH`."""
    return named_paths(filter(str.strip, value.split(","))) if isinstance(value, str) else value


def named_paths(pairs: Iterable[str], form: str = "NAME=PATH") -> dict[str, Path]:
    """Parse texts of this form. Raises ValueError for another one, and for a name that has two paths."""
    found: dict[str, Path] = {}
    for pair in pairs:
        name, _, path = map(str.strip, pair.partition("="))
        if not (name and path):
            raise ValueError(f"{pair.strip()!r} is not {form}")
        if name in found:
            raise ValueError(f"{name!r} is there twice; give each name one path")
        found[name] = Path(path)
    return found


def _entries(value: object) -> object:
    """Parse `ENTRY, ENTRY`. A text of only commas is refused, because an empty list may mean "allow all"."""
    if not isinstance(value, str):
        return value
    found = tuple(entry.strip() for entry in value.split(",") if entry.strip())
    if value.strip() and not found:
        raise ValueError(f"{value.strip()!r} contains no entry; leave it empty for none")
    return found


Paths = Annotated[dict[str, Path], NoDecode, BeforeValidator(_pairs)]
Entries = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_entries)]

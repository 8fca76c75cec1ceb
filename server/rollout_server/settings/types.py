"""Types of setting values, with their parsers, and the error for values that cannot be used."""

from __future__ import annotations

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
    if not isinstance(value, str):
        return value
    pairs = [pair.split("=", 1) for pair in value.split(",") if pair.strip()]
    wrong = [pair[0] for pair in pairs if len(pair) < 2 or not all(pair)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is not NAME=PATH")
    return {name.strip(): path.strip() for name, path in pairs}


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

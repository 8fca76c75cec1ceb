"""Kinds of values that settings have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, BeforeValidator
from pydantic_settings import NoDecode

TOY = "toy"
"""The word for the tokenizer that comes with this package, where a setting wants a directory."""


def env_names(*names: str) -> AliasChoices:
    """The environment names of a setting, ours first."""
    return AliasChoices(*names)


def _pairs(value: object) -> object:
    """Reads `NAME=PATH,NAME=PATH`."""
    if not isinstance(value, str):
        return value
    pairs = [pair.split("=", 1) for pair in value.split(",") if pair.strip()]
    wrong = [pair[0] for pair in pairs if len(pair) < 2 or not all(pair)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is not NAME=PATH")
    return {name.strip(): path.strip() for name, path in pairs}


def _entries(value: object) -> object:
    """Reads `ENTRY, ENTRY`. A text of commas alone is refused: an empty list may mean everything."""
    if not isinstance(value, str):
        return value
    found = tuple(entry.strip() for entry in value.split(",") if entry.strip())
    if value.strip() and not found:
        raise ValueError(f"{value.strip()!r} holds no entry; leave it empty if none is meant")
    return found


Paths = Annotated[dict[str, Path], NoDecode, BeforeValidator(_pairs)]
Entries = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_entries)]

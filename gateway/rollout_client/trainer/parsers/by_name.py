"""Parsers by their names, for configuration files."""

from __future__ import annotations

import pkgutil
from typing import cast

from rollout_client.trainer import parsers
from rollout_client.trainer.completion import Parse


def parser_by_name(name: str) -> Parse:
    """Return a parser by its name.

    Args:
        name: the name of one in `rollout_client.trainer.parsers`, which is applied after the reasoning, or
            "package.module:function".

    Raises ValueError, ImportError and AttributeError that name it.
    """
    if ":" in name:
        return cast(Parse, pkgutil.resolve_name(name))
    if name not in parsers.__all__ or name == "thinking":
        known = ", ".join(each for each in parsers.__all__ if each != "thinking")
        raise ValueError(
            f'parse: there is no parser {name!r}; use one of {known}, or a function as "package.module:function"'
        )
    return parsers.thinking(getattr(parsers, name))

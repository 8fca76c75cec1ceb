"""Options that a function takes by name only, as one dictionary."""

from __future__ import annotations

from collections.abc import Mapping


def check_options(function: str, given: Mapping[str, object], kind: type[object]) -> None:
    """Raises TypeError for options that the function does not have, as Python would for parameters. `kind` lists those it has."""
    unknown = sorted(given.keys() - kind.__annotations__.keys())
    if unknown:
        raise TypeError(f"{function} takes no {', '.join(unknown)}; it takes {', '.join(kind.__annotations__)}")

"""The strings and numbers that stand in a chat template's expressions.

A template can only look for text that is written in it, and compare counts with numbers that are. So these say, without knowing any
template family, which contents and lengths of a conversation its rendering may depend on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_MOST = 500
_LONGEST = 200


@dataclass(frozen=True, slots=True)
class Literals:
    """Strings that are not empty, and integers of at least 2, in rising order."""

    strings: frozenset[str] = frozenset()
    numbers: tuple[int, ...] = ()


def literals(templates: Iterable[str], environment: Any) -> Literals | None:
    """The literals of all templates; None where one has too many to look for in each message, or cannot be parsed.

    `environment` is the `jinja2.Environment` that compiles them, because its extensions decide what can be parsed.
    """
    from jinja2 import TemplateError, nodes

    found: set[object] = set()
    try:
        for template in templates:
            found.update(constant.value for constant in environment.parse(template).find_all(nodes.Const))
    except (TemplateError, RecursionError):
        return None
    strings = frozenset(value for value in found if isinstance(value, str) and 0 < len(value) <= _LONGEST)
    numbers = sorted({value for value in found if type(value) is int and value > 1})
    return Literals(strings, tuple(numbers)) if len(strings) + len(numbers) <= _MOST else None

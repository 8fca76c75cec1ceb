"""Error messages for the model about invalid arguments of a tool call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rollout_server.core.message import JSON

_MOST_ERRORS, _LONGEST = 5, 60
_MOST_DETAILS = 1000
"""Pydantic returns the details of all errors or of none, and needs seconds for very many, in which no other rollout runs."""
_SHOULD_BE = "Input should be "


def argument_errors(error: ValidationError, arguments: Mapping[str, JSON], of: str | None = None) -> str:
    """Describe a validation error in one line that names each parameter; at most five errors are listed.

    With `of`, only errors of that parameter are reported. More than a thousand errors are only counted.
    """
    if error.error_count() > _MOST_DETAILS:
        return f"{error.error_count():,} errors: unknown parameters, or values of the wrong type"
    details_by_path: dict[str, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False, include_context=False):
        if of is not None and detail["loc"][:1] != (of,):
            continue
        details_by_path.setdefault(_path(detail, arguments), []).append(detail)
    found = [
        f"{path}: {_error_text(details)}" if path else _error_text(details) for path, details in details_by_path.items()
    ]
    more = [f"and {len(found) - _MOST_ERRORS} more"] if len(found) > _MOST_ERRORS else []
    return "; ".join(found[:_MOST_ERRORS] + more)


def _error_text(details: Sequence[ErrorDetails]) -> str:
    """Describe the errors at one path. For a union, pydantic reports one error per member."""
    if details[0]["type"].startswith("missing"):
        return "missing"
    if details[0]["type"] == "unexpected_keyword_argument":
        return "unknown parameter"
    texts = list(dict.fromkeys(one_line(detail["msg"]) for detail in details))
    if not all(text.startswith(_SHOULD_BE) for text in texts):
        return " or ".join(texts)
    return (
        f"must be {' or '.join(text.removeprefix(_SHOULD_BE) for text in texts)}, not {_excerpt(details[0]['input'])}"
    )


def _path(detail: ErrorDetails, arguments: JSON) -> str:
    """Return the path of an error in the arguments.

    Pydantic's location also contains the names of union members. The model did not write those, so they are left out.
    """
    path, value = "", arguments
    missing = len(detail["loc"]) if detail["type"].startswith("missing") else 0
    for index, key in enumerate(detail["loc"], start=1):
        if isinstance(value, list) and isinstance(key, int):
            path, value = f"{path}[{key}]", value[key] if key < len(value) else None
        elif isinstance(value, Mapping) and isinstance(key, str) and (key in value or index == missing):
            name = key if key.isidentifier() else f"[{_excerpt(key)}]"
            path, value = f"{path}.{name}" if path else name, value.get(key)
    return path


def _excerpt(value: object) -> str:
    text = one_line(json.dumps(value, ensure_ascii=False, default=repr))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def one_line(text: str) -> str:
    """Replace line breaks and runs of white space by single spaces."""
    return " ".join(text.split())

"""Scripts as JSON, so that another process can set one with ``PUT /script``.

``{"lines": [{"reply": {"content": "Hello!"}}, {"fault": {"kind": "reset"}}], "repeat_last": false}``: the keys of a
reply and of a fault are the fields of `Reply` and `Fault`.
"""

import dataclasses
from typing import TypeVar

import msgspec

from rollout_server.testing.script import Fault, Line, Reply, Script

_Line = TypeVar("_Line", Reply, Fault)


def script_from_json(value: object) -> Script:
    """The script that a parsed JSON value describes; ValueError names the line and the field that is wrong."""
    if not isinstance(value, dict) or not isinstance(value.get("lines"), list):
        raise ValueError('a script is an object with a list "lines"')
    if unknown := set(value) - {"lines", "repeat_last"}:
        raise ValueError(f"unknown keys in the script: {sorted(unknown)}")
    repeat_last = value.get("repeat_last", False)
    if not isinstance(repeat_last, bool):
        raise ValueError("repeat_last is true or false")
    return Script(tuple(_line(index, line) for index, line in enumerate(value["lines"])), repeat_last)


def _line(index: int, value: object) -> Line:
    match value:
        case {"reply": dict(fields), **others} if not others:
            return _convert(index, Reply, fields)
        case {"fault": dict(fields), **others} if not others:
            return _convert(index, Fault, fields)
    raise ValueError(f'lines[{index}] is an object with the one key "reply" or "fault"')


def _convert(index: int, kind: type[_Line], fields: dict[str, object]) -> _Line:
    if unknown := set(fields) - {field.name for field in dataclasses.fields(kind)}:
        raise ValueError(f"lines[{index}] has unknown keys: {sorted(unknown)}")
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"lines[{index}]: {error}") from error

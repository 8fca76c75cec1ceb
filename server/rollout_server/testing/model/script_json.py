"""Scripts as JSON, for other processes that set one with ``PUT /script``.

``{"lines": [{"reply": {"content": "Hello!"}}, {"fault": {"kind": "reset"}}], "repeat_last": false}``: the keys of the script,
of a reply and of a fault are the fields of `Script`, `ScriptedReply` and `Fault`. ``{"then_model": true,
"extensions": {"usage": true}, "reception": {"faults": [{"kind": "closed"}]}}`` is a script that uses the model for all turns.
"""

import dataclasses
from typing import Any, Final, TypeVar

import msgspec

from rollout_server.testing.script import Extensions, Fault, Line, Reception, Script, ScriptedReply

_Value = TypeVar("_Value", ScriptedReply, Fault, Extensions)
_KEYS: Final = frozenset(field.name for field in dataclasses.fields(Script))


def script_from_json(value: object) -> Script:
    """Return the script that a parsed JSON value describes. Raises ValueError, which names the invalid line and field."""
    if not isinstance(value, dict):
        raise ValueError('a script has to be an object with a list "lines"')
    _check_keys(value, _KEYS, "the script")
    then_model = _switch(value, "then_model")
    lines = value.get("lines", [] if then_model else None)
    if not isinstance(lines, list):
        raise ValueError('a script has to be an object with a list "lines"')
    return Script(
        tuple(_line(index, line) for index, line in enumerate(lines)),
        _switch(value, "repeat_last"),
        then_model,
        _convert("extensions", Extensions, value.get("extensions", {})),
        _reception(value.get("reception", {})),
    )


def _line(index: int, value: object) -> Line:
    match value:
        case {"reply": dict(fields), **others} if not others:
            return _convert(f"lines[{index}]", ScriptedReply, fields)
        case {"fault": dict(fields), **others} if not others:
            return _convert(f"lines[{index}]", Fault, fields)
    raise ValueError(f'lines[{index}] has to be an object with the single key "reply" or "fault"')


def _reception(value: object) -> Reception:
    if not isinstance(value, dict) or not isinstance(value.get("faults", []), list):
        raise ValueError('reception has to be an object with a list "faults"')
    _check_keys(value, {"faults", "repeat_last"}, "reception")
    faults = enumerate(value.get("faults", []))
    return Reception(
        tuple(_convert(f"reception.faults[{index}]", Fault, fault) for index, fault in faults),
        _switch(value, "repeat_last"),
    )


def _switch(value: dict[str, Any], name: str) -> bool:
    switch = value.get(name, False)
    if not isinstance(switch, bool):
        raise ValueError(f"{name} has to be true or false")
    return switch


def _convert(path: str, kind: type[_Value], fields: object) -> _Value:
    if not isinstance(fields, dict):
        raise ValueError(f"{path} is not an object")
    _check_keys(fields, {field.name for field in dataclasses.fields(kind)}, path)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}") from error


def _check_keys(value: dict[str, Any], known: "frozenset[str] | set[str]", path: str) -> None:
    if unknown := set(value) - known:
        raise ValueError(f"unknown keys in {path}: {sorted(unknown)}")

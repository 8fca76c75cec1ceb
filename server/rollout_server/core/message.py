"""Messages as JSON text, carried verbatim (D13).

A message is never parsed and written again: key order, white space, unknown keys, large integers and the difference between
absent, null and empty all survive. Parsing happens beside the text, where somebody needs to know what it says.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

JSON: TypeAlias = "str | int | float | bool | Sequence[JSON] | Mapping[str, JSON] | None"


MAX_DEPTH = 256
MAX_VALUES = 100_000
"""JSON values of one request: a value takes two bytes as text, and hundreds where it is parsed."""
_MAX_DIGITS = 4300
# Possessive, and content with a string that is not closed: it never goes back.
_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[][{}]', re.DOTALL)
# What is a text of JSON, and what stands between two.
_PARTS = re.compile(rb'[^"]++|"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_QUOTE = ord('"')
_NO_SEPARATORS = bytes(code for code in range(256) if code not in b",[{")
_PIECE = 1024 * 1024


class MalformedMessage(ValueError):
    """The text is not a message. The text of the error says why."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it. `arguments` is text, usually JSON, or the object that a trainer had already parsed."""

    id: str
    name: str
    arguments: str | Mapping[str, JSON]


@dataclass(frozen=True, slots=True)
class Message:
    """One message: its JSON text, and its role."""

    text: str
    role: str

    @classmethod
    def parse(cls, text: str) -> Message:
        """Takes a JSON object with a non-blank string under "role". Raises `MalformedMessage`."""
        return cls.parsed(text, parse_object(text))

    @classmethod
    def parsed(cls, text: str, fields: Mapping[str, JSON]) -> Message:
        """The message whose text says `fields`. Raises `MalformedMessage`."""
        role = fields.get("role")
        if not isinstance(role, str) or not role.strip():
            raise MalformedMessage('"role" is missing or not a string')
        return cls(text, role)

    @classmethod
    def write(cls, fields: Mapping[str, JSON]) -> Message:
        """Writes a message of our own. Halves of surrogate pairs, which UTF-8 does not have, become question marks."""
        text = json.dumps(fields, ensure_ascii=False, allow_nan=False)
        return cls.parse(text.encode("utf-8", "replace").decode("utf-8"))

    def fields(self) -> Mapping[str, JSON]:
        """What the text says. Parsed anew at each call."""
        return parse_object(self.text)


def tool_calls(fields: Mapping[str, JSON]) -> tuple[ToolCall, ...]:
    """The calls of an assistant message, in order. Raises `MalformedMessage` naming the field."""
    calls = fields.get("tool_calls")
    if calls is None:
        return ()
    if not isinstance(calls, list):
        raise MalformedMessage("tool_calls is not a list")
    return tuple(_tool_call(call, index) for index, call in enumerate(calls))


def parse_json(
    text: str,
    *,
    parse_int: Callable[[str], JSON] = int,
    parse_float: Callable[[str], JSON] = float,
    parse_pairs: Callable[[list[tuple[str, JSON]]], JSON] | None = None,
) -> JSON:
    """Parses JSON. Unlike `json.loads` it refuses NaN and Infinity, which are not JSON. Raises `MalformedMessage`."""
    if _is_deep(text):
        raise MalformedMessage(f"nested more than {MAX_DEPTH} levels deep")
    try:
        value: JSON = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_int=parse_int,
            parse_float=parse_float,
            object_pairs_hook=parse_pairs,
        )
    except ValueError as error:
        raise MalformedMessage(str(error)) from None
    return value


def utf8_length(text: str) -> int:
    """Bytes of a text in UTF-8; halves of surrogate pairs have three."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def has_more_values(data: bytes, most: int) -> bool:
    """Whether some JSON holds more than `most` values. Its separators are counted, and nothing is built."""
    # Those within strings among them, which nearly always are few.
    return _separators(data) > most and _values(data, most) > most


def first_too_many(texts: Sequence[str], most: int = MAX_VALUES) -> int | None:
    """The index of the JSON text with which all of them hold more than `most` values; None where they do not."""
    # Those within strings among them, which nearly always are few.
    if sum(text.count(",") + text.count("[") + text.count("{") for text in texts) <= most:
        return None
    values = 0
    for index, text in enumerate(texts):
        values += _values(text.encode("utf-8", "surrogatepass"), most)
        if values > most:
            return index
    return None


def _values(data: bytes, most: int) -> int:
    """The values of some JSON: each follows a comma, or begins a list or an object. Some number above `most`: there are more."""
    found = 0
    for number, part in enumerate(_PARTS.finditer(data)):
        text = part[0]
        if text[0] != _QUOTE:
            found += _separators(text)
        if found > most or number > 4 * most:  # a value has at most a name and a text, and something beside each
            return most + 1
    return found


def _separators(data: bytes) -> int:
    """How many there are, found in one pass. Piece by piece, since another thread gets the GIL only in between."""
    if len(data) <= _PIECE:
        return len(data.translate(None, _NO_SEPARATORS))
    return sum(_separators(data[at : at + _PIECE]) for at in range(0, len(data), _PIECE))


def _is_deep(text: str) -> bool:
    """Whether JSON is nested deeper than is read, which must not depend on how deep the caller's stack is."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    depth = 0
    for match in _BRACKETS.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
        if depth > MAX_DEPTH:
            return True
    return False


def parse_object(text: str) -> dict[str, JSON]:
    """Parses one JSON object. Integers that Python does not convert, over 4,300 digits, read as infinite.

    Raises `MalformedMessage`.
    """
    value = parse_json(text, parse_int=_integer)
    if not isinstance(value, dict):
        raise MalformedMessage(f"a JSON object is needed, this is {type(value).__name__}")
    return value


def _integer(digits: str) -> float:
    if len(digits) <= _MAX_DIGITS:
        return int(digits)
    return -math.inf if digits.startswith("-") else math.inf


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _tool_call(call: JSON, index: int) -> ToolCall:
    where = f"tool_calls[{index}]"
    if not isinstance(call, dict):
        raise MalformedMessage(f"{where} is not an object")
    function = call.get("function")
    if not isinstance(function, dict):
        raise MalformedMessage(f"{where}.function is missing or not an object")
    name, arguments, call_id = function.get("name"), function.get("arguments", ""), call.get("id")
    if not isinstance(name, str):
        raise MalformedMessage(f"{where}.function.name is missing or not a string")
    if not isinstance(call_id, str):
        raise MalformedMessage(f"{where}.id is missing or not a string")
    if arguments is None:
        arguments = ""
    if not isinstance(arguments, str | dict):
        raise MalformedMessage(f"{where}.function.arguments is neither a string nor an object")
    return ToolCall(call_id, name, arguments)

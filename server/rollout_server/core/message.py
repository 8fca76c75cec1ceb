"""Messages as JSON text, carried verbatim (D13).

A message is never parsed and serialised again. So key order, white space, unknown keys, large integers, and the difference between
absent, null and empty all survive. The text is parsed only where the server needs a field.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

JSON: TypeAlias = "str | int | float | bool | Sequence[JSON] | Mapping[str, JSON] | None"


MAX_DEPTH = 256
MAX_VALUES = 100_000
"""Maximum number of JSON values in one request. A value can be 2 bytes of text, but takes hundreds of bytes once parsed."""
_MAX_DIGITS = 4300
# Possessive quantifiers, and an unclosed string matches too: no backtracking, so the time is linear for any input.
_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[][{}]', re.DOTALL)
# A JSON string, or the text between two strings.
_PARTS = re.compile(rb'[^"]++|"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_QUOTE = ord('"')
_NO_SEPARATORS = bytes(code for code in range(256) if code not in b",[{")
_PIECE = 1024 * 1024


class MalformedMessage(ValueError):
    """The text is not a valid message; the error's text says why."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call as the model wrote it.

    `arguments` is text, usually JSON, or an object if the trainer had parsed it already.
    """

    id: str
    name: str
    arguments: str | Mapping[str, JSON]


@dataclass(frozen=True, slots=True)
class Message:
    """One message: its JSON text and its role."""

    text: str
    role: str

    @classmethod
    def parse(cls, text: str) -> Message:
        """Parse a JSON object with a non-blank string under "role". Raises `MalformedMessage`."""
        return cls.parsed(text, parse_object(text))

    @classmethod
    def parsed(cls, text: str, fields: Mapping[str, JSON]) -> Message:
        """Return the message of a text whose parsed form is `fields`. Raises `MalformedMessage`."""
        role = fields.get("role")
        if not isinstance(role, str) or not role.strip():
            raise MalformedMessage('"role" is missing or not a string')
        return cls(text, role)

    @classmethod
    def write(cls, fields: Mapping[str, JSON]) -> Message:
        """Serialise a message of the server or an agent. Lone surrogates, which UTF-8 cannot encode, become question marks."""
        text = json.dumps(fields, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace").decode("utf-8")
        role = fields.get("role") if type(fields) is dict else None
        if type(role) is str and role.isascii() and not _is_deep(text):  # it is what parsing the text again would give
            return cls.parsed(text, fields)
        return cls.parse(text)

    def fields(self) -> Mapping[str, JSON]:
        """Parse the text. Each call parses it again."""
        return parse_object(self.text)


def tool_calls(fields: Mapping[str, JSON]) -> tuple[ToolCall, ...]:
    """Return the tool calls of an assistant message, in order. Raises `MalformedMessage`, which names the field."""
    calls = fields.get("tool_calls")
    if calls is None:
        return ()
    if not isinstance(calls, list):
        raise MalformedMessage("tool_calls is not a list")
    return tuple(_tool_call(call, index) for index, call in enumerate(calls))


def json_decoder(
    parse_int: Callable[[str], JSON] = int,
    parse_float: Callable[[str], JSON] = float,
    parse_pairs: Callable[[list[tuple[str, JSON]]], JSON] | None = None,
    *,
    strict: bool = True,
) -> json.JSONDecoder:
    """Return a decoder for `parse_json`. Making one takes longer than decoding a short text.

    With `strict=False` it accepts control characters, such as line breaks, in strings.
    """
    return json.JSONDecoder(
        parse_constant=_refuse_constant,
        parse_int=parse_int,
        parse_float=parse_float,
        object_pairs_hook=parse_pairs,
        strict=strict,
    )


def parse_json(text: str, decoder: json.JSONDecoder | None = None) -> JSON:
    """Parse JSON. Unlike `json.loads` it refuses NaN and Infinity, which are not JSON, and more than `MAX_DEPTH` levels.

    Raises `MalformedMessage`.
    """
    if _is_deep(text):
        raise MalformedMessage(f"nested more than {MAX_DEPTH} levels deep")
    try:
        value: JSON = (decoder or _PLAIN).decode(text)
    except ValueError as error:
        raise MalformedMessage(str(error)) from None
    return value


def utf8_length(*texts: str) -> int:
    """Return the length of texts in UTF-8 bytes. A lone surrogate counts as three bytes."""
    text = "".join(texts)
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def has_more_values(data: bytes, most: int) -> bool:
    """Return whether JSON text contains more than `most` values. Counts separators and builds no objects."""
    # The cheap count includes separators inside strings, so it is an upper bound. Only if it is too high are strings skipped.
    return len(data) > most and _separators(data) > most and _values(data, most) > most


def first_too_many(texts: Sequence[str], most: int = MAX_VALUES) -> int | None:
    """Return the index of the JSON text at which the total number of values exceeds `most`, or None if it never does."""
    # An upper bound, see `has_more_values`.
    if sum(text.count(",") + text.count("[") + text.count("{") for text in texts) <= most:
        return None
    values = 0
    for index, text in enumerate(texts):
        values += _values(text.encode("utf-8", "surrogatepass"), most)
        if values > most:
            return index
    return None


def _values(data: bytes, most: int) -> int:
    """Count the values of JSON text outside strings: each follows a comma or opens a list or an object.

    Stops early and returns `most + 1` if there are more.
    """
    found = 0
    for number, part in enumerate(_PARTS.finditer(data)):
        text = part[0]
        if text[0] != _QUOTE:
            found += _separators(text)
        # A value has at most two strings, its key and itself, and some text between them: four parts.
        if found > most or number > 4 * most:
            return most + 1
    return found


def _separators(data: bytes) -> int:
    """Count commas and opening brackets in one pass, in pieces, because `translate` holds the GIL for a whole piece."""
    if len(data) <= _PIECE:
        return len(data.translate(None, _NO_SEPARATORS))
    return sum(_separators(data[at : at + _PIECE]) for at in range(0, len(data), _PIECE))


def _is_deep(text: str) -> bool:
    """Return whether JSON is nested deeper than `MAX_DEPTH`. The parser's own limit would depend on the caller's stack depth."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    depth = 0
    for match in _BRACKETS.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
        if depth > MAX_DEPTH:
            return True
    return False


def parse_object(text: str, decoder: json.JSONDecoder | None = None) -> dict[str, JSON]:
    """Parse one JSON object. Integers of more than 4,300 digits, which Python does not convert, become infinite.

    Raises `MalformedMessage`.
    """
    value = parse_json(text, decoder or _OBJECTS)
    if not isinstance(value, dict):
        raise MalformedMessage(f"a JSON object is needed, this is {type(value).__name__}")
    return value


def _integer(digits: str) -> float:
    if len(digits) <= _MAX_DIGITS:
        return int(digits)
    return -math.inf if digits.startswith("-") else math.inf


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_PLAIN = json_decoder()
_OBJECTS = json_decoder(_integer)
ARGUMENTS: Final = json_decoder(strict=False)
"""Decoder of a tool call's arguments: models write line breaks into strings, which is not JSON, but clear."""


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

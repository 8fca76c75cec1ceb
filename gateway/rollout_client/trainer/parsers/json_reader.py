"""Reads JSON out of a text without losing how it was written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rollout_client.trainer.completion import ParsedCompletion, ToolCall

# What a number is does not matter here, and some have too many digits to be read. Line breaks within strings are no JSON, but
# where the string ends is clear.
_JSON: Final = json.JSONDecoder(parse_int=len, parse_float=len, strict=False)
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_UNREADABLE: Final = (ValueError, RecursionError)
#: Calls that may fail to be read before the rest of a text is content: each may look at all of it.
MOST_FAILURES: Final = 64


@dataclass(frozen=True, slots=True)
class Value:
    """A JSON value and its text."""

    value: object
    text: str


def skip_space(text: str, at: int) -> int:
    """Behind the white space."""
    match = _SPACE.match(text, at)
    return match.end() if match else at


def json_value(text: str, at: int) -> tuple[Value, int] | None:
    """The value that begins here, and where it ends; None: none does."""
    try:
        found, end = _JSON.raw_decode(text, at)
    except _UNREADABLE:
        return None
    return Value(found, text[at:end]), end


def object_members(text: str, at: int) -> tuple[Mapping[str, Value], int] | None:
    """The members of the object that begins here, and where it ends. None: no object does, or a key comes twice."""
    if not text.startswith("{", at):
        return None
    found: dict[str, Value] = {}
    at = skip_space(text, at + 1)
    if text.startswith("}", at):
        return found, at + 1
    while True:
        read = _member(text, at)
        if read is None or read[0] in found:
            return None
        key, member, at = read
        found[key] = member
        if text.startswith("}", at):
            return found, at + 1
        if not text.startswith(",", at):
            return None
        at = skip_space(text, at + 1)


def _member(text: str, at: int) -> tuple[str, Value, int] | None:
    key = json_value(text, at)
    colon = skip_space(text, key[1]) if key else at
    if key is None or not isinstance(key[0].value, str) or not text.startswith(":", colon):
        return None
    read = json_value(text, skip_space(text, colon + 1))
    return (key[0].value, read[0], skip_space(text, read[1])) if read else None


def to_tool_call(fields: Mapping[str, Value], keys: Sequence[str], *, needs_arguments: bool) -> ToolCall | None:
    """The call that an object stands for; None: it is none. `keys` are the names that arguments go by.

    What else stands in an object without them may be the arguments by another name, so it is a call only if nothing does.
    """
    given = [fields[key].text for key in keys if key in fields]
    if len(given) > 1 or (not given and (needs_arguments or fields.keys() - {"name", "id", "type"})):
        return None
    name = to_name(fields.get("name"))
    return ToolCall(name, given[0] if given else "{}", to_name(fields.get("id")) or "") if name else None


def to_name(found: Value | None) -> str | None:
    """A text that can be a name: not blank, and UTF-8 can carry it."""
    if found is None or not isinstance(found.value, str) or not found.value.strip():
        return None
    try:
        found.value.encode()
    except UnicodeEncodeError:
        return None
    return found.value


def parsed_completion(text: str, calls: Sequence[ToolCall], content: Sequence[str]) -> ParsedCompletion:
    """The answer of a text: without calls all of it is content; with some, what is around them is."""
    return ParsedCompletion("".join(content).strip(), tuple(calls)) if calls else ParsedCompletion(text)

"""JSON scanning that keeps the exact text of each value."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rollout_client.trainer.completion import ParsedCompletion, ToolCall

# Only the text of a number is used. `len` as the parser avoids int(), which rejects very long numbers. strict=False accepts line
# breaks in strings: they are invalid JSON, but models generate them and the end of the string is unambiguous.
_JSON: Final = json.JSONDecoder(parse_int=len, parse_float=len, strict=False)
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_UNREADABLE: Final = (ValueError, RecursionError)
#: After this many malformed calls the rest is content. Each one may scan the whole text, so this bounds the quadratic cost.
MOST_FAILURES: Final = 64


@dataclass(frozen=True, slots=True)
class Value:
    """A parsed JSON value and its exact text."""

    value: object
    text: str


def skip_space(text: str, at: int) -> int:
    """Return the index after the JSON white space at `at`."""
    match = _SPACE.match(text, at)
    return match.end() if match else at


def json_value(text: str, at: int) -> tuple[Value, int] | None:
    """Return the JSON value that starts at `at` and the index after it; None if there is none."""
    try:
        found, end = _JSON.raw_decode(text, at)
    except _UNREADABLE:
        return None
    return Value(found, text[at:end]), end


def object_members(text: str, at: int) -> tuple[Mapping[str, Value], int] | None:
    """Return the members of the JSON object at `at` and the index after it; None without a valid object or with a repeated key."""
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
    """Convert an object to a tool call; None if it is not one.

    Args:
        fields: members of the object.
        keys: accepted names of the arguments; exactly one may occur.
        needs_arguments: False: arguments may be missing. The object must then have no members besides name, id and type, because
            one of them could be the arguments under another name.
    """
    given = [fields[key].text for key in keys if key in fields]
    if len(given) > 1 or (not given and (needs_arguments or fields.keys() - {"name", "id", "type"})):
        return None
    name = to_name(fields.get("name"))
    return ToolCall(name, given[0] if given else "{}", to_name(fields.get("id")) or "") if name else None


def to_name(found: Value | None) -> str | None:
    """Return a str value that can be a name: not blank and encodable as UTF-8; otherwise None."""
    if found is None or not isinstance(found.value, str) or not found.value.strip():
        return None
    try:
        found.value.encode()
    except UnicodeEncodeError:
        return None
    return found.value


def parsed_completion(text: str, calls: Sequence[ToolCall], content: Sequence[str]) -> ParsedCompletion:
    """Return the completion: without calls the whole text is content, otherwise the parts around the calls."""
    return ParsedCompletion("".join(content).strip(), tuple(calls)) if calls else ParsedCompletion(text)

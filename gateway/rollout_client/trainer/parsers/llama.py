"""Llama 3 tool calls: `{"name": ..., "parameters": {...}}`, separated by `;`, with or without `<|python_tag|>` in front.

Calls of built-in tools are `<|python_tag|>name.call(key="value")`. Other Python code after the tag is content.
"""

from __future__ import annotations

import json
import re
from typing import Final

from rollout_client.trainer.completion import ParsedCompletion, ToolCall
from rollout_client.trainer.parsers.json_reader import (
    json_value,
    object_members,
    parsed_completion,
    skip_space,
    to_tool_call,
)

_TAG: Final = "<|python_tag|>"
_BUILT_IN: Final = re.compile(r"([A-Za-z_]\w*)\.call\(")
_KEYWORD: Final = re.compile(r"([A-Za-z_]\w*)[ \t]*=[ \t]*")


def llama(text: str) -> ParsedCompletion:
    """Parse Llama 3 calls. Without the tag, the whole text must consist of calls: JSON within prose is content."""
    before, tag, after = text.partition(_TAG)
    calls = _calls(after if tag else text)
    if tag and not calls:
        built_in = _built_in(after)
        calls = [built_in] if built_in else []
    return parsed_completion(text, calls, [before] if tag else [])


def _calls(text: str) -> list[ToolCall]:
    """Return the calls of a text that consists only of calls; otherwise an empty list."""
    calls: list[ToolCall] = []
    at = skip_space(text, 0)
    while True:
        read = object_members(text, at)
        call = to_tool_call(read[0], ("parameters", "arguments"), needs_arguments=True) if read else None
        if read is None or call is None:
            return []
        calls.append(call)
        at = skip_space(text, read[1])
        separated = text.startswith((";", _TAG), at)
        if separated:
            at = skip_space(text, at + (1 if text[at] == ";" else len(_TAG)))
        if at == len(text):
            return calls
        if not separated:
            return []


def _built_in(text: str) -> ToolCall | None:
    """Parse a built-in call. Its keyword arguments become a JSON object with the exact text of each value, which must be JSON."""
    begin = skip_space(text, 0)
    head = _BUILT_IN.match(text, begin)
    if head is None:
        return None
    written: dict[str, str] = {}
    at = skip_space(text, head.end())
    while not text.startswith(")", at):
        keyword = _KEYWORD.match(text, at)
        read = json_value(text, keyword.end()) if keyword else None
        if keyword is None or read is None or keyword[1] in written:
            return None
        written[keyword[1]] = read[0].text
        at = skip_space(text, read[1])
        if text.startswith(",", at):
            at = skip_space(text, at + 1)
        elif not text.startswith(")", at):
            return None
    if skip_space(text, at + 1) != len(text):
        return None
    arguments = ", ".join(f"{json.dumps(key)}: {each}" for key, each in written.items())
    return ToolCall(head[1], f"{{{arguments}}}")

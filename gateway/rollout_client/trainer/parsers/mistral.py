"""Mistral tool calls. Depending on the tokenizer version, one of these forms follows `[TOOL_CALLS]`:

`[{"name": ..., "arguments": {...}, "id": ...}, ...]`, `name{...}`, `name[ARGS]{...}` and `name[CALL_ID]id[ARGS]{...}`.
"""

from __future__ import annotations

import re
from typing import Final

from rollout_client.trainer.completion import ParsedCompletion, ToolCall
from rollout_client.trainer.parsers.json_reader import (
    MOST_FAILURES,
    json_value,
    object_members,
    parsed_completion,
    skip_space,
    to_tool_call,
)

_MARK: Final = "[TOOL_CALLS]"
_HEAD: Final = re.compile(r"([\w.\-]+)[ \t]*(?:\[CALL_ID\]([\w\-]+))?[ \t]*(?:\[ARGS\])?")


def mistral(text: str) -> ParsedCompletion:
    """Parse calls after `[TOOL_CALLS]`. Text outside the calls is content."""
    calls: list[ToolCall] = []
    content: list[str] = []
    done = at = failures = 0
    while failures < MOST_FAILURES and (at := text.find(_MARK, at)) >= 0:
        begin = skip_space(text, at + len(_MARK))
        read = _list(text, begin) or _object(text, begin) or _named(text, begin)
        if read is None:
            failures += 1
            at += len(_MARK)
            continue
        content.append(text[done:at])
        calls += read[0]
        done = at = read[1]
    return parsed_completion(text, calls, [*content, text[done:]])


def _list(text: str, at: int) -> tuple[list[ToolCall], int] | None:
    """Return all calls of a list, or None if one is malformed: a partial list is not what the model meant."""
    if not text.startswith("[", at):
        return None
    calls: list[ToolCall] = []
    while True:
        read = _object(text, skip_space(text, at + 1))
        if read is None:
            return None
        calls += read[0]
        at = skip_space(text, read[1])
        if text.startswith("]", at):
            return calls, at + 1
        if not text.startswith(",", at):
            return None


def _object(text: str, at: int) -> tuple[list[ToolCall], int] | None:
    read = object_members(text, at)
    call = to_tool_call(read[0], ("arguments",), needs_arguments=True) if read else None
    return ([call], read[1]) if read and call else None


def _named(text: str, at: int) -> tuple[list[ToolCall], int] | None:
    head = _HEAD.match(text, at)
    if head is None:
        return None
    begin = skip_space(text, head.end())
    read = json_value(text, begin) if text.startswith("{", begin) else None
    return ([ToolCall(head[1], read[0].text, head[2] or "")], read[1]) if read else None

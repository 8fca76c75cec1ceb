"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as often as there are calls."""

from __future__ import annotations

from typing import Final

from rollout_client.trainer.completion import ParsedCompletion, ToolCall
from rollout_client.trainer.parsers.reading import MOST_FAILURES, answer_of, call_of, members, space

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"


def hermes(text: str) -> ParsedCompletion:
    """Reads tagged calls. The last closing tag may be missing, as it is where a stop text cut it off.

    Arguments may also go by "parameters", the word that a tool's definition has for them.
    Models that think out loud need `thinking(hermes)`: a call they only think of is none.
    """
    calls: list[ToolCall] = []
    content: list[str] = []
    done = at = failures = 0
    while failures < MOST_FAILURES and (at := text.find(_OPEN, at)) >= 0:
        read = _call(text, at + len(_OPEN))
        if read is None:
            failures += 1
            at += len(_OPEN)
            continue
        content.append(text[done:at])
        calls.append(read[0])
        done = at = read[1]
    return answer_of(text, calls, [*content, text[done:]])


def _call(text: str, at: int) -> tuple[ToolCall, int] | None:
    read = members(text, space(text, at))
    call = call_of(read[0], ("arguments", "parameters"), needs_arguments=False) if read else None
    if read is None or call is None:
        return None
    end = space(text, read[1])
    if text.startswith(_CLOSE, end):
        return call, end + len(_CLOSE)
    return (call, end) if end == len(text) else None

"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, several times; and thinking before it."""

from __future__ import annotations

from typing import Final

from rollout_client.trainer.completion import Parse, ParsedCompletion, ToolCall
from rollout_client.trainer.parsers.json_reader import (
    MOST_FAILURES,
    object_members,
    parsed_completion,
    skip_space,
    to_tool_call,
)

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
    return parsed_completion(text, calls, [*content, text[done:]])


def _call(text: str, at: int) -> tuple[ToolCall, int] | None:
    read = object_members(text, skip_space(text, at))
    call = to_tool_call(read[0], ("arguments", "parameters"), needs_arguments=False) if read else None
    if read is None or call is None:
        return None
    end = skip_space(text, read[1])
    if text.startswith(_CLOSE, end):
        return call, end + len(_CLOSE)
    return (call, end) if end == len(text) else None


def thinking(parse: Parse, begin: str = "<think>", end: str = "</think>") -> Parse:
    """A parser that takes the thinking off first, so that no call is found in it.

    The opening mark may stand in the prompt, as some templates have it. Thinking that has no end is all there is.
    """

    def parse_behind(text: str) -> ParsedCompletion:
        thought, ended, rest = text.partition(end)
        opened = thought.lstrip().startswith(begin)
        if not ended and not opened:
            return parse(text)
        reasoning = thought.lstrip().removeprefix(begin).strip()
        completion = parse(rest.lstrip("\r\n")) if ended else ParsedCompletion("")
        return ParsedCompletion(completion.content, completion.tool_calls, reasoning)

    return parse_behind

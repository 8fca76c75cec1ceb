"""Hermes and Qwen tool calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, repeated; and reasoning before them."""

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
    """Parse `<tool_call>` tags. The last closing tag may be missing, for example if it is a stop text.

    "parameters" is accepted in place of "arguments". For reasoning models use `thinking(hermes)`: a tool call inside the reasoning
    is not a call.
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
    """Return a parser that removes the reasoning first, so that no tool call is found in it.

        parse = thinking(hermes)

    The opening tag may be missing, because some chat templates put it into the prompt. Without a closing tag, an opened reasoning
    extends to the end of the text.

    Args:
        parse: parser for the text after the reasoning.
        begin: opening tag.
        end: closing tag.
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

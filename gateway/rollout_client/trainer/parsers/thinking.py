"""Thinking that stands before the answer."""

from __future__ import annotations

from rollout_client.trainer.completion import Parse, ParsedCompletion


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
        answer = parse(rest.lstrip("\r\n")) if ended else ParsedCompletion("")
        return ParsedCompletion(answer.content, answer.tool_calls, reasoning)

    return parse_behind

"""Where the last answer ends in a rendered conversation, which is where the environment begins (tokens.md, R1).

The stop token behind the answer cannot be looked for from the end: tool output may contain its text. So the conversation is
rendered once more with a mark in the first message after the answer, and the last stop before the mark is the one. The mark
must not have changed anything before that place, or a template looked at what stands around it; then another place in
the message is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import TypeAlias

from rollout_server.edge.tokens.encoding import common_prefix
from rollout_server.edge.tokens.form import Fields
from rollout_server.runtime.port import Failed

Render: TypeAlias = Callable[[Sequence[Fields], bool], str]
"""Renders messages, with a generation prompt or without."""


def environment_text(render: Render, messages: Sequence[Fields], first: int, stop: str, full: str) -> str | None:
    """What `full`, the rendering of `messages` with a generation prompt, holds after the stop of the last answer.

    `first` is the index of the first message after the answer. None where the place cannot be told.
    """
    if first >= len(messages):
        return _generation_prompt(render, messages, stop, full)
    mark = _absent_from(full)
    for marked in _marked(messages[first], mark, stop):
        text = _try(render, [*messages[:first], marked, *messages[first + 1 :]], True)
        found = _before_mark(text, mark, 0, stop, full)
        if found is None:  # a template may look for the same message elsewhere in the conversation (Mistral)
            same = [marked if message == messages[first] else message for message in messages]
            found = _before_mark(_try(render, same, True), mark, same[:first].count(marked), stop, full)
        if found is not None:
            return found
    return None


def _before_mark(text: str | None, mark: str, number: int, stop: str, full: str) -> str | None:
    """What `full` holds after the last stop before one of the marks in `text`: the one that has `number` before it."""
    if text is None:
        return None
    parts = text.split(mark)
    if len(parts) < number + 2:
        return None
    return _after_stop("".join(parts[: number + 1]), stop, full)


def _generation_prompt(render: Render, messages: Sequence[Fields], stop: str, full: str) -> str | None:
    """What follows an answer after which nothing was said."""
    behind = text_after_answer(render, messages, len(messages) - 1, full)
    if behind is not None:
        _, closed, found = behind.partition(stop)
        return found if closed else None
    text = _after_stop(_try(render, messages, False), stop, full)
    if text is None or (_try(render, messages[:-1], False) or "").startswith(full[: len(full) - len(text)]):
        return None  # the stop is that of an earlier message: there are templates that close the last of all in another way
    return text


def stands_behind(text: str, full: str, prompt: str) -> bool:
    """Whether the stop in front of `text`, the end of `full`, ends behind the answer's `prompt`, or what is left of that.

    One that does not is the stop of an earlier message: templates may leave the answer open where they close others.
    """
    return len(full) - len(text) > common_prefix(prompt, full)


def text_after_answer(render: Render, messages: Sequence[Fields], answered: int, full: str) -> str | None:
    """What `full` holds after the text of the answer at `answered`, for templates that close answers with no token of their own.

    None where the answer ends with something else than its text.
    """
    content = messages[answered].get("content")
    if not isinstance(content, str) or messages[answered].get("tool_calls"):
        return None
    mark = _absent_from(full)
    marked = [*messages[:answered], {**messages[answered], "content": content + mark}, *messages[answered + 1 :]]
    text = _try(render, marked, True)
    if text is None or (at := text.find(mark)) < 0 or text[:at] != full[:at]:
        return None
    return full[at:] if text[at + len(mark) :] == full[at:] else None


def _absent_from(text: str) -> str:
    return next(mark for number in count() if (mark := f"Zq{number}EnvironmentBegins") not in text)


def _try(render: Render, messages: Sequence[Fields], generation_prompt: bool) -> str | None:
    try:
        return render(messages, generation_prompt)
    except Failed:
        return None


def _after_stop(text: str | None, stop: str, full: str) -> str | None:
    """What `full` holds after the last stop of `text`, if they are the same up to there."""
    if text is None or (found := text.rfind(stop)) < 0:
        return None
    end = found + len(stop)
    return full[end:] if text[:end] == full[:end] else None


def _marked(message: Fields, mark: str, stop: str) -> Iterator[Fields]:
    """The message with the mark in its text, at several places."""
    content = message.get("content")
    if isinstance(content, str):
        yield from ({**message, "content": text} for text in _places(content, mark, stop))
    elif isinstance(content, list) and content and isinstance(part := content[0], Mapping):
        for text in _places(str(part.get("text", "")), mark, stop):
            yield {**message, "content": [{**part, "text": text}, *content[1:]]}
    else:
        yield {**message, "content": mark}


def _places(text: str, mark: str, stop: str) -> Iterator[str]:
    """The text with the mark in front, in the middle and at the end, as long as no stop comes before it."""
    for at in sorted({0, len(text) // 2, len(text)}):
        if stop not in text[:at]:
            yield text[:at] + mark + text[at:]

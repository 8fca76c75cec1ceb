"""Where the last answer ends in a rendered conversation, which is where the environment begins (docs/design.md, R1).

The stop token behind the answer cannot be looked for from the end: tool output may contain its text. Nor can the first one behind
the prompt always be taken: the answer may contain it, and a template may rewrite what stood before. So there are three ways to look
for it, and the cheap ones come first:

- the first stop behind what the prompt and the full rendering have in common;
- backward: the conversation is rendered once more with a mark in the first message after the answer, and the last stop before that
  mark is taken. The mark must not have changed anything before that place, or the template looks at what stands around it; then
  another place in the message is tried;
- forward: it is rendered with a mark at the end of the answer's own text, and the first stop behind that place is taken. A template
  may write a reminder between answer and environment and close it with the same stop: backward finds the reminder's, forward the
  answer's.

Where the first two agree, and the answer does not say the stop itself, nothing but that one stop stands between answer and
environment, and the third is not needed, unless earlier messages were rewritten: then both may have found the stop of one of those.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rollout_server.core.message import JSON
from rollout_server.edge.tokens.encoding import common_prefix
from rollout_server.edge.tokens.rendering_form import Fields, strings
from rollout_server.runtime.errors import RolloutFailed

Render: TypeAlias = Callable[[Sequence[Fields], bool], str]
"""Renders messages, with a generation prompt or without."""

_NEAR = 64
"""How many characters of syntax a template may write between an argument of a call and the next one."""


@dataclass(frozen=True, slots=True)
class RenderedTurn:
    """A conversation as a template writes it.

    Args:
        render: renders other messages in the same way.
        messages: the conversation.
        answered: the index of the last answer in it.
        full: the conversation with a generation prompt.
        prompt: the messages before the answer with a generation prompt.
    """

    render: Render
    messages: Sequence[Fields]
    answered: int
    full: str
    prompt: str

    def with_message(self, index: int, message: Fields) -> str | None:
        """The full rendering with another message in one place; None where the template refuses it."""
        return _try(self.render, [*self.messages[:index], message, *self.messages[index + 1 :]], True)


def new_mark() -> str:
    """A word that no conversation and no template contains. It stands behind most others in any order of words."""
    return f"zq{secrets.token_hex(8)}"


def environment_text(turn: RenderedTurn, stop: str, hint: str | None = None) -> str | None:
    """What the full rendering holds behind the stop of the last answer; None where that place cannot be told.

    `hint` is a text that is likely to be the environment. It saves renderings where it is.
    """
    start = common_prefix(turn.prompt, turn.full)
    first = _first_stop(turn.full, stop, max(0, start - len(stop) + 1))
    while first is not None and first <= start:
        first = _first_stop(turn.full, stop, first - len(stop) + 1)
    if first is None:
        return None
    plain = not any(stop in said for said in strings(turn.messages[turn.answered]))
    # Where the template has rewritten what stands before the answer, the first stop may be that of an earlier message.
    rewritten = stop in turn.prompt[start:]
    if hint is not None and turn.full[first:] == hint and plain and not rewritten:
        return hint
    text = _behind_last_stop(turn, stop)
    if text is None or (end := len(turn.full) - len(text)) <= start:
        return None  # the stop of an earlier message: templates may leave an answer open where they close others
    if end == first and plain and not rewritten:
        return text
    said = _completion_end(turn, calls_only=not plain)
    # What stands behind the completion may begin as the mark's own syntax does, so this place may be within its stop.
    closed = None if said is None else _first_stop(turn.full, stop, max(0, said - len(stop) + 1))
    return turn.full[closed:] if closed is not None and start < closed <= end else None


def likely_environment(turn: RenderedTurn, stop: str) -> str | None:
    """What follows the last stop before the first message behind the answer: a guess, to be used as `environment_text`'s hint."""
    return _behind_last_stop(turn, stop)


def text_after_completion(turn: RenderedTurn) -> str | None:
    """What the full rendering holds behind the text of the answer, for templates that close it with no token of their own.

    None where the answer ends with something else than its text.
    """
    answer = turn.messages[turn.answered]
    content = answer.get("content")
    if not isinstance(content, str) or answer.get("tool_calls"):
        return None
    mark = new_mark()
    text = turn.with_message(turn.answered, {**answer, "content": content + mark})
    if text is None or (at := text.find(mark)) < 0 or text[:at] != turn.full[:at]:
        return None
    return turn.full[at:] if text[at + len(mark) :] == turn.full[at:] else None


def unseen_messages(turn: RenderedTurn, environment: str) -> Sequence[int]:
    """The indices of messages behind the answer whose text the environment does not hold in any spelling."""
    return [
        index
        for index in range(turn.answered + 1, len(turn.messages))
        if any(text.strip() not in environment for text in _content(turn.messages[index]))
        and not _shows(turn, index, len(environment))
    ]


def _first_stop(text: str, stop: str, start: int) -> int | None:
    """The end of the first stop that begins at `start` or later."""
    found = text.find(stop, start)
    return None if found < 0 else found + len(stop)


def _behind_last_stop(turn: RenderedTurn, stop: str) -> str | None:
    """What follows the last stop before the first message behind the answer that the template shows."""
    mark = new_mark()
    for index in range(turn.answered + 1, len(turn.messages)):
        shown = False
        for marked in _marked(turn.messages[index], mark, stop):
            text = turn.with_message(index, marked)
            shown = shown or mark in (text or "")
            found = _before_mark(text, mark, range(1), stop, turn.full)
            if found is None:  # a template may look for the same message elsewhere in the conversation (Mistral)
                same = [marked if message == turn.messages[index] else message for message in turn.messages]
                numbers = range(same[:index].count(marked), same.count(marked))
                found = _before_mark(_try(turn.render, same, True), mark, numbers, stop, turn.full)
            if found is not None:
                return found
        if shown:
            return None
    # Nothing was added, or only system messages that are not shown. A model that sees no tool result cannot go on.
    said, added = turn.messages[: turn.answered + 1], turn.messages[turn.answered + 1 :]
    if any(message.get("role") not in ("system", "developer") for message in added):
        return None
    return _generation_prompt(turn, stop) if not added or _try(turn.render, said, True) == turn.full else None


def _before_mark(text: str | None, mark: str, numbers: range, stop: str, full: str) -> str | None:
    """What `full` holds after the last stop before a mark in `text`: before the first of `numbers`, counted from 0.

    The mark stands in as many messages as `numbers` has ends. Where a template shows it more often, it quotes a message, and
    nobody knows which one is the quotation: then the answer must be the same for all of them, or it is None.
    """
    parts = [] if text is None else text.split(mark)
    shown = len(parts) - 1
    if shown < numbers.stop:
        return None
    places = numbers[:1] if shown == numbers.stop else range(numbers.start, shown)
    found = {_after_stop("".join(parts[: number + 1]), stop, full) for number in places}
    return found.pop() if len(found) == 1 else None


def _generation_prompt(turn: RenderedTurn, stop: str) -> str | None:
    """What follows an answer after which nothing was said."""
    behind = text_after_completion(turn)
    if behind is not None:
        _, closed, found = behind.partition(stop)
        return found if closed else None
    said = turn.messages[: turn.answered + 1]
    text = _after_stop(_try(turn.render, said, False), stop, turn.full)
    if text is None:
        return None
    # It may be the stop of an earlier message: there are templates that close the last of all in another way.
    before, end = _try(turn.render, said[:-1], False) or "", len(turn.full) - len(text)
    if before.startswith(turn.full[:end]):
        return None
    if turn.full.startswith(before):
        return text
    said_end = _completion_end(turn, calls_only=False)
    return text if said_end is not None and said_end <= end else None


def _completion_end(turn: RenderedTurn, *, calls_only: bool) -> int | None:
    """A place in the full rendering where the answer's own text has ended; None where the template does not tell.

    `calls_only`: of an answer with calls only their end counts, because they contain the stop and may stand behind the rest.
    """
    mark = new_mark()
    answer = turn.messages[turn.answered]
    for marked, syntax in _marked_completions(answer, mark):
        if calls_only and answer.get("tool_calls") and marked["tool_calls"] is answer["tool_calls"]:
            break
        text = turn.with_message(turn.answered, marked)
        if text is None or text.count(mark) != 1:  # a template that quotes the answer shows it elsewhere, too
            continue
        at = text.find(mark)
        place = common_prefix(text, turn.full)
        same_end = common_prefix(text[::-1], turn.full[::-1])
        # Else the mark changed something before the answer, or more than spaces gave way to it.
        if at - syntax <= place and not turn.full[place : len(turn.full) - same_end].strip():
            return place
    return None


def _marked_completions(answer: Fields, mark: str) -> Iterator[tuple[Fields, int]]:
    """The answer with the mark at the end of what a template writes last: the last call, the content, the reasoning.

    The number says how many characters of the template's own may come with the mark, in front of it.
    """
    calls = answer.get("tool_calls")
    if isinstance(calls, list) and calls and isinstance(call := calls[-1], Mapping):
        function = call.get("function")
        if isinstance(function, Mapping):
            changed: JSON = {**call, "function": {**function, "arguments": _with_mark(function.get("arguments"), mark)}}
            yield {**answer, "tool_calls": [*calls[:-1], changed]}, _NEAR
    content = answer.get("content")
    if content is None or isinstance(content, str):
        yield {**answer, "content": (content or "").rstrip() + mark}, 0 if content else _NEAR
    elif isinstance(content, list) and content and isinstance(part := content[-1], Mapping):
        last = str(part.get("text", "")).rstrip()
        yield {**answer, "content": [*content[:-1], {**part, "text": last + mark}]}, 0 if last else _NEAR
    for name in ("reasoning_content", "reasoning", "thinking"):
        if isinstance(text := answer.get(name), str):
            yield {**answer, name: text.rstrip() + mark}, 0 if text else _NEAR


def _with_mark(arguments: JSON, mark: str) -> JSON:
    """The arguments with the mark behind all others, also where a template sorts them."""
    return {**arguments, mark: 0} if isinstance(arguments, Mapping) else f"{arguments or ''}".rstrip() + mark


def _shows(turn: RenderedTurn, index: int, length: int) -> bool:
    """Whether a mark in the message's text shows in the environment, which has about this length."""
    mark = new_mark()
    texts = (turn.with_message(index, marked) or "" for marked in _marked(turn.messages[index], mark, ""))
    return any((at := text.rfind(mark)) >= 0 and at >= len(text) - length - 2 * len(mark) for text in texts)


def _content(message: Fields) -> Iterator[str]:
    content = message.get("content")
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
            yield text


def _try(render: Render, messages: Sequence[Fields], generation_prompt: bool) -> str | None:
    try:
        return render(messages, generation_prompt)
    except RolloutFailed:
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
        yield from ({**message, "content": text} for text in _mark_positions(content, mark, stop))
    elif isinstance(content, list) and content and isinstance(part := content[0], Mapping):
        for text in _mark_positions(str(part.get("text", "")), mark, stop):
            yield {**message, "content": [{**part, "text": text}, *content[1:]]}
    else:
        yield {**message, "content": mark}


def _mark_positions(text: str, mark: str, stop: str) -> Iterator[str]:
    """The text with the mark in front, in the middle and at the end, as long as no stop comes before it."""
    for at in sorted({0, len(text) // 2, len(text)}):
        if not stop or stop not in text[:at]:
            yield text[:at] + mark + text[at:]

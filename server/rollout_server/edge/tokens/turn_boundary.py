"""Find the turn boundary: the place in a rendered conversation where the last completion ends (docs/design.md, R1).

The environment begins after the stop token of the last completion. Finding that token is not trivial:

- the last stop token in the text may be in a tool result, because tool output can contain `<|im_end|>`;
- the first one after the prompt may be in the completion's content or arguments;
- the template may rewrite earlier messages (Qwen3 drops their thinking), so the rendering need not start with the prompt.

Three searches are combined, the cheap ones first:

- first stop: the first stop token after the common prefix of the prompt and the full rendering;
- backward: render again with a random mark in the first message after the completion, and take the last stop token before
  the mark. The mark must not change any text before that stop token. If it does, the template depends on the marked place, and
  another place in the message is tried;
- forward: render again with a mark at the end of the completion's own text, and take the first stop token after it.

A template may write a reminder between completion and environment and close it with the same stop token. Then backward finds
the reminder's stop token and forward finds the completion's.

Usually no search is needed: the same turn is rendered once after one made-up user message, and what follows its completion there
is also what follows the first stop token here (`likely_environment`).

If the first two searches agree and the completion does not contain the stop token's text, that stop token is the only one
between completion and environment, and forward is skipped. Forward is still needed if earlier messages were rewritten, because
then both searches may have found the stop token of an earlier message.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rollout_server.core.message import JSON
from rollout_server.edge.tokens.encoding import common_prefix
from rollout_server.edge.tokens.rendering_form import Fields, strings
from rollout_server.runtime.errors import RolloutFailed

Render: TypeAlias = Callable[[Sequence[Fields], bool], str]
"""Renders messages; the second argument says whether to add a generation prompt."""

_REASONING = ("reasoning_content", "reasoning", "thinking")
_TEXTS = ("content", *_REASONING)
_NEAR = 64
"""Maximum number of characters of syntax that a template may write between two arguments of a tool call."""
_FIRST_CALLS = 8
"""First calls of which each is tried as the last one that a template renders. A completion may have a thousand calls."""


@dataclass(frozen=True, slots=True)
class RenderedTurn:
    """A conversation and its renderings.

    Args:
        render: renders other messages in the same way.
        messages: the conversation.
        answered: the index of the last completion in `messages`.
        full: the conversation, rendered with a generation prompt.
        prompt: the messages before the completion, rendered with a generation prompt.
    """

    render: Render
    messages: Sequence[Fields]
    answered: int
    full: str
    prompt: str

    def with_message(self, index: int, message: Fields) -> str | None:
        """Return the full rendering with one message replaced; None if the template refuses it."""
        return try_render(self.render, [*self.messages[:index], message, *self.messages[index + 1 :]], True)


@dataclass(frozen=True, slots=True)
class LastText:
    """The last text of a completion, without white space at its end, and the position behind it in the full rendering.

    `is_known`: whether the position was found. Otherwise the text is what the template writes before the stop token.
    """

    text: str
    end: int
    is_known: bool = True


def try_render(render: Render, messages: Sequence[Fields], generation_prompt: bool = True) -> str | None:
    """Return the rendered messages; None if the template refuses them."""
    try:
        return render(messages, generation_prompt)
    except RolloutFailed:
        return None


def new_mark() -> str:
    """Return a random string that no conversation and no template contains.

    It begins with "zq" and so sorts after almost any word: a template may sort the keys of arguments.
    """
    return f"zq{secrets.token_hex(8)}"


def environment_text(turn: RenderedTurn, stop: str, hint: str | None = None) -> str | None:
    """Return the text after the stop token of the last completion in the full rendering; None if it cannot be determined.

    `hint` is the probable result. If it is right, no further renderings are needed.
    """
    start = common_prefix(turn.prompt, turn.full)
    first = _first_stop(turn.full, stop, max(0, start - len(stop) + 1))
    while first is not None and first <= start:
        first = _first_stop(turn.full, stop, first - len(stop) + 1)
    if first is None:
        return None
    plain = not any(stop in text for text in strings(turn.messages[turn.answered]))
    # If the template has rewritten text before the completion, the first stop token may belong to an earlier message.
    rewritten = stop in turn.prompt[start:]
    if hint is not None and turn.full[first:] == hint and plain and not rewritten:
        return hint
    text = _behind_last_stop(turn, stop)
    if text is None or (end := len(turn.full) - len(text)) <= start:
        return None  # the stop token of an earlier message: a template may close only some completions
    if end == first and plain and not rewritten:
        return text
    written = _completion_end(turn, calls_only=not plain)
    # The text after the completion may begin like the syntax around the mark, so `written` may lie inside the stop token.
    closed = None if written is None else _first_stop(turn.full, stop, max(0, written - len(stop) + 1))
    return turn.full[closed:] if closed is not None and start < closed <= end else None


def likely_environment(render: Render, messages: Sequence[Fields], answered: int, stop: str) -> str | None:
    """Return the text after the last stop token before the environment's first message, found with one rendering.

    This is a guess, used as the `hint` of `environment_text`. The mark is removed again, in the hope that the template has not
    looked at it.
    """
    following = messages[answered + 1 :]
    if not following:
        return None
    # Behind the first character: templates strip white space from the ends of a text.
    mark = new_mark()
    marked = next(_with_mark_at(following[0], mark, lambda text: (1,)))
    text = try_render(render, [*messages[: answered + 1], marked, *following[1:]], True)
    if text is None or text.count(mark) != 1 or (found := text.rfind(stop, 0, text.find(mark))) < 0:
        return None
    return text[found + len(stop) :].replace(mark, "")


def text_after_completion(turn: RenderedTurn) -> str | None:
    """Return the text of the full rendering after the completion's content, for templates that write no stop token.

    None if the rendered completion does not end with its content.
    """
    completion = turn.messages[turn.answered]
    content = completion.get("content")
    if not isinstance(content, str) or completion.get("tool_calls"):
        return None
    mark = new_mark()
    text = turn.with_message(turn.answered, {**completion, "content": content + mark})
    if text is None or (at := text.find(mark)) < 0 or text[:at] != turn.full[:at]:
        return None
    return turn.full[at:] if text[at + len(mark) :] == turn.full[at:] else None


def last_text(turn: RenderedTurn, stop_at: int) -> LastText:
    """Return the last text of the completion that the template shows before the stop token at `stop_at`: its content, or reasoning.

    It is empty if the template shows none. The position is unknown for completions with tool calls, which templates spell in their
    own way, and if the template shows the text twice or depends on it.
    """
    completion, mark = turn.messages[turn.answered], new_mark()
    before = turn.full[:stop_at].rstrip()
    unknown = LastText(before, len(before), is_known=False)
    if completion.get("tool_calls"):
        return unknown
    marked = [each for each, _ in _marked_completions(completion, mark)]
    texts = [next(text for text in strings(each) if text.endswith(mark)).removesuffix(mark) for each in marked]
    for text, each in sorted(zip(texts, marked, strict=True), key=lambda pair: not pair[0]):
        rendered = turn.with_message(turn.answered, each)
        if rendered is None or mark not in rendered:
            continue
        start, _, end = rendered.partition(mark)
        between = turn.full[len(start) : len(turn.full) - len(end)]
        whole = mark not in end and turn.full == start + between + end
        return LastText(text, len(start)) if whole and not between.strip() and len(start) <= stop_at else unknown
    return unknown


def unseen_messages(turn: RenderedTurn, environment: str) -> Sequence[int]:
    """Return the indices of messages after the completion whose text does not occur in the environment in any spelling."""
    return [
        index
        for index in range(turn.answered + 1, len(turn.messages))
        if any(text.strip() not in environment for text in _content(turn.messages[index]))
        and not _shows(turn, index, len(environment))
    ]


def repeats_completion(turn: RenderedTurn, environment: str) -> bool:
    """Return whether the environment has text of the completion, which the model then sees twice.

    Gemma 4's template writes the calls of a completion, their results, and only then its content. The last line of a text
    decides, because a template may drop what is before it. A mark there tells a repetition from a message with the same words.
    """
    completion, mark = turn.messages[turn.answered], new_mark()
    for name in _TEXTS:
        text = completion.get(name)
        if not isinstance(text, str) or not text.strip():
            continue
        said = text.rstrip()
        if said.rpartition("\n")[2].strip() in environment:
            marked = turn.with_message(turn.answered, {**completion, name: said + mark})
            if marked is not None and not marked.endswith(environment):
                return True
    return False


def _first_stop(text: str, stop: str, start: int) -> int | None:
    """Return the end of the first stop token that begins at `start` or later."""
    found = text.find(stop, start)
    return None if found < 0 else found + len(stop)


def _behind_last_stop(turn: RenderedTurn, stop: str) -> str | None:
    """Return the text after the last stop token before the first message that the template shows after the completion."""
    mark = new_mark()
    for index in range(turn.answered + 1, len(turn.messages)):
        shown = False
        for marked in _marked(turn.messages[index], mark, stop):
            text = turn.with_message(index, marked)
            shown = shown or mark in (text or "")
            found = _before_mark(text, mark, range(1), stop, turn.full)
            # Mistral's template prints the tools before every message that equals the last user message. A mark in one message
            # breaks that equality and moves the tools, so all messages equal to this one are marked together.
            if found is None:
                same = [marked if message == turn.messages[index] else message for message in turn.messages]
                numbers = range(same[:index].count(marked), same.count(marked))
                found = _before_mark(try_render(turn.render, same, True), mark, numbers, stop, turn.full)
            if found is not None:
                return found
        if shown:
            return None
    # No message was added, or only system messages that the template does not show (many show only a leading one). Any other
    # hidden message means that no boundary can be claimed: a model that does not see a tool result cannot continue.
    answered, added = turn.messages[: turn.answered + 1], turn.messages[turn.answered + 1 :]
    if any(message.get("role") not in ("system", "developer") for message in added):
        return None
    return _generation_prompt(turn, stop) if not added or try_render(turn.render, answered, True) == turn.full else None


def _before_mark(text: str | None, mark: str, numbers: range, stop: str, full: str) -> str | None:
    """Return the text of `full` after the last stop token before a mark in `text`.

    `numbers` selects marks by their index: `numbers.stop` messages contain the mark, and the mark at `numbers.start` is the one
    in the environment. If the template shows more marks than that, it quotes a message, and the quotation cannot be identified.
    Then all candidates must give the same result; otherwise the result is None.
    """
    parts = [] if text is None else text.split(mark)
    shown = len(parts) - 1
    if shown < numbers.stop:
        return None
    places = numbers[:1] if shown == numbers.stop else range(numbers.start, shown)
    found = {_after_stop("".join(parts[: number + 1]), stop, full) for number in places}
    return found.pop() if len(found) == 1 else None


def _generation_prompt(turn: RenderedTurn, stop: str) -> str | None:
    """Return the text after a completion that no message follows."""
    after = text_after_completion(turn)
    if after is not None:
        _, closed, found = after.partition(stop)
        return found if closed else None
    answered = turn.messages[: turn.answered + 1]
    text = _after_stop(try_render(turn.render, answered, False), stop, turn.full)
    if text is None:
        return None
    # The stop token may belong to an earlier message: some templates close the very last message differently (gpt-oss).
    before, end = try_render(turn.render, answered[:-1], False) or "", len(turn.full) - len(text)
    if before.startswith(turn.full[:end]):
        return None
    if turn.full.startswith(before):
        return text
    written = _completion_end(turn, calls_only=False)
    return text if written is not None and written <= end else None


def _completion_end(turn: RenderedTurn, *, calls_only: bool) -> int | None:
    """Return a position in the full rendering at or after the end of the completion's own text; None if it cannot be determined.

    `calls_only`: for a completion whose tool calls are rendered, use only the end of the calls. The calls contain the stop token's
    text and may be rendered after the content.
    """
    mark = new_mark()
    completion = turn.messages[turn.answered]
    reached = 0  # the completion extends at least to here
    calls_shown = False
    for marked, syntax in _marked_completions(completion, mark):
        in_calls = marked.get("tool_calls") is not completion.get("tool_calls")
        if calls_only and calls_shown and not in_calls:
            break
        text = turn.with_message(turn.answered, marked)
        calls_shown |= in_calls and (text is None or mark in text)
        if text is None or mark not in text:
            continue
        at = text.find(mark)
        place = common_prefix(text, turn.full)
        same_end = common_prefix(text[::-1], turn.full[::-1])
        # More than one mark: the template quotes the completion elsewhere. The other conditions: the mark changed no text before
        # the completion and replaced only white space, and no part of the completion that the template shows lies behind it.
        alone = text.count(mark) == 1 and at - syntax <= place
        if alone and place >= reached and not turn.full[place : len(turn.full) - same_end].strip():
            return place
        reached = max(reached, min(at, place))
    return None


def _marked_completions(completion: Fields, mark: str) -> Iterator[tuple[Fields, int]]:
    """Yield the completion with the mark at the end of a part that a template may write last: a call, content or reasoning.

    The calls are the last one and the first ones in reverse order, because a template may render only the first ones. The number is
    the maximum length of template syntax that may be added in front of the mark.
    """
    calls = completion.get("tool_calls")
    calls = calls if isinstance(calls, list) else []
    numbered = list(enumerate(calls))
    for index, call in reversed([*numbered[:_FIRST_CALLS], *numbered[_FIRST_CALLS:][-1:]]):
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(call, Mapping) and isinstance(function, Mapping):
            changed: JSON = {**call, "function": {**function, "arguments": _with_mark(function.get("arguments"), mark)}}
            yield {**completion, "tool_calls": [*calls[:index], changed, *calls[index + 1 :]]}, _NEAR
    content = completion.get("content")
    if content is None or isinstance(content, str):
        yield {**completion, "content": (content or "").rstrip() + mark}, 0 if content else _NEAR
    elif isinstance(content, list) and content and isinstance(part := content[-1], Mapping):
        last = str(part.get("text", "")).rstrip()
        yield {**completion, "content": [*content[:-1], {**part, "text": last + mark}]}, 0 if last else _NEAR
    for name in _REASONING:
        if isinstance(text := completion.get(name), str):
            yield {**completion, name: text.rstrip() + mark}, 0 if text else _NEAR


def _with_mark(arguments: JSON, mark: str) -> JSON:
    """Return the arguments with the mark after all others, also if a template sorts them."""
    return {**arguments, mark: 0} if isinstance(arguments, Mapping) else f"{arguments or ''}".rstrip() + mark


def _shows(turn: RenderedTurn, index: int, length: int) -> bool:
    """Return whether a mark in the message's text appears in the environment, whose length is about `length` characters."""
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


def _after_stop(text: str | None, stop: str, full: str) -> str | None:
    """Return the text of `full` after the last stop token of `text`; None unless both texts are equal up to there."""
    if text is None or (found := text.rfind(stop)) < 0:
        return None
    end = found + len(stop)
    return full[end:] if text[:end] == full[:end] else None


def _marked(message: Fields, mark: str, stop: str) -> Iterator[Fields]:
    """Yield the message with the mark at several places of its text."""
    return _with_mark_at(message, mark, lambda text: _mark_positions(text, stop))


def _with_mark_at(message: Fields, mark: str, positions: Callable[[str], Iterable[int]]) -> Iterator[Fields]:
    """Yield the message with the mark at each position of its text."""
    content = message.get("content")
    if isinstance(content, str):
        yield from ({**message, "content": text} for text in _inserted(content, mark, positions(content)))
    elif isinstance(content, list) and content and isinstance(part := content[0], Mapping):
        first = str(part.get("text", ""))
        for text in _inserted(first, mark, positions(first)):
            yield {**message, "content": [{**part, "text": text}, *content[1:]]}
    else:
        yield {**message, "content": mark}


def _inserted(text: str, mark: str, positions: Iterable[int]) -> Iterator[str]:
    return (text[:at] + mark + text[at:] for at in positions)


def _mark_positions(text: str, stop: str) -> Sequence[int]:
    """Return the start, the middle and the end of a text, but no position after a stop token in the text itself."""
    return [at for at in sorted({0, len(text) // 2, len(text)}) if not stop or stop not in text[:at]]

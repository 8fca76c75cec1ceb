"""Whether the ids that a call brings along are what its messages give: the judge of token mode.

It is as plain as the rest of the judge: it renders whole conversations with `PlainRenderer` and compares. What it proves
of the ids between two answers, the environment, by the first of these ways that the template allows:

1. The conversation, rendered as a whole, begins with what is held. Then the environment has to be the rest of that
   rendering, token for token. It is so for templates that only append, and for the prompt that a segment begins with.
2. The template writes history in another way than the model did (it drops thinking, or spells a call's arguments anew).
   Then the answer before the environment is replaced by two others, and what both renderings end with in common, behind
   the end token of the answer, is the environment, token for token. What stands before the answer is not compared: it is
   held here with its digest, and was judged when it came.
3. There is no end token behind an answer. Then it is only seen that the texts of the messages occur in the environment, in
   order.

Arguments of tool calls are rendered as they were received and, where that differs, as objects; either will do. Not
proved at all is what a history holds as the model's own words where this trainer never held them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rollout_server.testing.checks.renderer import Message, PlainRenderer, Tools, UnrenderableError
from rollout_server.testing.model.calculator import text_of

_AROUND: Final = 12
_LONGEST_EXCERPT: Final = 80
_VARIANTS: Final = ("one", "two")


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """What stands in front of one answer, ``ids[start:stop]`` of a prompt.

    `closing` of them, at its start, end the completion before, which is ``messages[completion_index]``; None for the
    prompt that a segment begins with. `messages` of the conversation come before the answer that follows. `cut` says
    that the answer before ended for its length.
    """

    turn: int
    start: int
    stop: int
    messages: int
    completion_index: int | None = None
    closing: int = 0
    cut: bool = False


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """The ids that a call is to be completed from, and those spans of them that were not judged yet."""

    ids: list[int]
    spans: tuple[PromptSpan, ...]


@dataclass(frozen=True, slots=True)
class _Expected:
    ids: list[int]
    closing: int


class TokenModeCheck:
    """Judges the ids of token mode. For the thread that owns the renderer."""

    def __init__(self, renderer: PlainRenderer) -> None:
        self._renderer = renderer
        self._forms = (renderer, renderer.in_other_form())

    def fault(self, messages: Sequence[Message], tools: Tools | None, prompt: TokenPrompt) -> str | None:
        """What is wrong, in words that name turn, token and the text around it; None if nothing is.

        UnrenderableError where the template takes the messages in no form.
        """
        found = (self._span_fault(messages[: span.messages], tools, prompt.ids, span) for span in prompt.spans)
        return next((fault for fault in found if fault), None)

    def _span_fault(
        self, messages: Sequence[Message], tools: Tools | None, ids: list[int], span: PromptSpan
    ) -> str | None:
        sent = ids[span.start : span.stop]
        expected = self._expected_spans(messages, tools, ids, span)
        if not expected:
            return self._text_fault(messages, sent, span)
        if any(each.ids == sent and each.closing == span.closing for each in expected):
            return None
        first = expected[0]
        if first.ids == sent:
            return (
                f"turn {span.turn}: {span.closing} tokens from token {span.start} on are said to close the answer "
                f"before, {first.closing} do"
            )
        return self._difference(first.ids, sent, span)

    def _expected_spans(
        self, messages: Sequence[Message], tools: Tools | None, ids: list[int], span: PromptSpan
    ) -> list[_Expected]:
        """All that would be right, what the trainer itself would render first."""
        expected: list[_Expected] = []
        refusals: list[UnrenderableError] = []
        forms = self._forms if any(message.get("tool_calls") for message in messages) else self._forms[:1]
        for form in forms:
            try:
                expected += _expected_appended(form, messages, tools, ids, span) or _after_completion(
                    form, messages, tools, ids, span
                )
            except UnrenderableError as error:
                refusals.append(error)
        if len(refusals) == len(forms):
            raise refusals[0]
        return expected

    def _difference(self, expected: list[int], sent: list[int], span: PromptSpan) -> str:
        index = next((i for i, (a, b) in enumerate(zip(expected, sent, strict=False)) if a != b), None)
        at = min(len(expected), len(sent)) if index is None else index
        before = self._excerpt(sent[max(0, at - _AROUND) : at], tail=True)
        return (
            f"turn {span.turn}: token {span.start + at} is not what the messages give. Behind {before} "
            f"here comes {self._excerpt(expected[at : at + _AROUND])}, sent was {self._excerpt(sent[at : at + _AROUND])} "
            f"({len(expected)} tokens from token {span.start} on here, {len(sent)} sent)"
        )

    def _excerpt(self, ids: list[int], *, tail: bool = False) -> str:
        if not ids:
            return "nothing"
        text = self._renderer.decode(ids)
        return repr(text[-_LONGEST_EXCERPT:] if tail else text[:_LONGEST_EXCERPT])

    def _text_fault(self, messages: Sequence[Message], sent: list[int], span: PromptSpan) -> str | None:
        text, at = self._renderer.decode(sent), 0
        first = 0 if span.completion_index is None else span.completion_index + 1
        for index in range(first, len(messages)):
            content = text_of(messages[index]).strip()
            found = text.find(content, at)
            if found < 0:
                return f"turn {span.turn}: the text of messages[{index}] does not stand in the tokens, or not in order"
            at = found + len(content)
        return None


def _expected_appended(
    renderer: PlainRenderer, messages: Sequence[Message], tools: Tools | None, ids: list[int], span: PromptSpan
) -> list[_Expected]:
    """The rest of the whole conversation's rendering, where it begins with what is held and breaks off at the answer's end."""
    plain = renderer.prompt(messages, tools)
    if span.completion_index is None:
        return [_Expected(plain, 0)]
    start = span.start
    if plain[:start] != ids[:start]:
        return []
    if renderer.is_end(ids[start - 1]) and not span.cut:
        return [_Expected(plain[start:], 0)]
    closed = any(map(renderer.is_end, plain[start : start + 1])) and not renderer.is_end(ids[start - 1])
    return [_Expected(plain[start:], 1)] if closed else []


def _after_completion(
    renderer: PlainRenderer, messages: Sequence[Message], tools: Tools | None, ids: list[int], span: PromptSpan
) -> list[_Expected]:
    """What every rendering has behind the answer, whatever the answer says."""
    if span.completion_index is None:
        return []
    text = renderer.text(messages, tools)
    last = ids[span.start - 1]
    expected = []
    suffix = _common_suffix(renderer, messages, tools, span.completion_index)
    for stop in _stops(renderer, suffix, last):
        tail = suffix[suffix.index(renderer.decode([stop])) :]
        encoded = renderer.encode(tail)
        if not text.endswith(tail) or encoded[0] != stop:
            continue
        ended = last == stop or (renderer.is_end(last) and not span.cut)
        expected.append(_Expected(encoded[1:], 0) if ended else _Expected(encoded, 1))
    return expected


def _common_suffix(
    renderer: PlainRenderer, messages: Sequence[Message], tools: Tools | None, completion_index: int
) -> str:
    for vary in (_with_arguments, _with_content):
        others = [list(messages), list(messages)]
        for other, variant in zip(others, _VARIANTS, strict=True):
            other[completion_index] = vary(messages[completion_index], variant)
        one, two = (renderer.text(other, tools) for other in others)
        if one != two:
            pairs = enumerate(zip(reversed(one), reversed(two), strict=False))
            shared = next((index for index, (a, b) in pairs if a != b), min(len(one), len(two)))
            return one[len(one) - shared :]
    return ""


def _stops(renderer: PlainRenderer, suffix: str, last: int) -> Iterator[int]:
    """The end tokens that the answer may have in a rendering: the first one, or that which it really ended with."""
    ends = [token_id for token_id in renderer.encode(suffix) if renderer.is_end(token_id)]
    yield from ends[:1]
    if last in ends[1:] and last != ends[0]:
        yield last


def _with_arguments(message: Message, variant: str) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    return {**message, "tool_calls": [_call_with(call, variant) for call in calls]}


def _call_with(call: Any, variant: str) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    as_text = isinstance(function.get("arguments"), str)
    arguments = f'{{"value": "{variant}"}}' if as_text else {"value": variant}
    return {**call, "function": {**function, "arguments": arguments}}


def _with_content(message: Message, variant: str) -> Message:
    return {**message, "content": variant}

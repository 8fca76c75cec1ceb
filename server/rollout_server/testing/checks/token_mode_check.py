"""Check of token mode: are the token ids of a request those that its messages render to?

Like the rest of the judge, it only renders whole conversations with `PlainRenderer` and compares. It verifies the environment
tokens between two completions by the first of these methods that the template allows:

1. The rendering of the whole conversation begins with the ledger's tokens. Then the environment must equal the rest of that
   rendering, token by token. This applies to append-only templates, and to the first prompt of a segment.
2. The template renders history differently from what the model wrote (it drops thinking, or re-serializes the arguments of a
   call). Then the completion before the environment is replaced by two others. The common suffix of the two renderings, after the
   stop token of the completion, is the environment. The tokens before the completion are not compared: the ledger's
   digest covers them, and they were verified when they were received.
3. The template writes no stop token after a completion. Then the check only requires that the texts of the messages occur in the
   environment, in order.

Arguments of tool calls are rendered as received and, if that differs, as objects; either form is accepted. Tokens that a history
declares as the model's are not verified if this trainer never had them.
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
    """The tokens before one completion: ``ids[start:stop]`` of a prompt.

    Args:
        messages: number of messages before the completion that follows.
        completion_index: index of the message with the previous completion; None for the first prompt of a segment.
        closing: number of tokens at the start of the span that close the previous completion.
        cut: the previous completion was truncated by its length limit.
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
    """The ids to generate from, and those of their spans that are not verified yet."""

    ids: list[int]
    spans: tuple[PromptSpan, ...]


@dataclass(frozen=True, slots=True)
class _Expected:
    ids: list[int]
    closing: int


class TokenModeCheck:
    """Verifies the ids of token mode. Use it only in the thread that owns the renderer."""

    def __init__(self, renderer: PlainRenderer) -> None:
        self._renderer = renderer
        self._forms = (renderer, renderer.in_other_form())

    def fault(self, messages: Sequence[Message], tools: Tools | None, prompt: TokenPrompt) -> str | None:
        """Return the first difference, with turn, token and the text around it; None if all ids are correct.

        Raises UnrenderableError if the template accepts the messages in no form.
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
                f"turn {span.turn}: {span.closing} tokens from token {span.start} on are marked as closing the previous "
                f"completion, expected are {first.closing}"
            )
        return self._difference(first.ids, sent, span)

    def _expected_spans(
        self, messages: Sequence[Message], tools: Tools | None, ids: list[int], span: PromptSpan
    ) -> list[_Expected]:
        """Return all acceptable spans; the first one is what the trainer itself would render."""
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
            f"turn {span.turn}: token {span.start + at} is not what the messages render to. After {before} the trainer "
            f"expects {self._excerpt(expected[at : at + _AROUND])}, the request has {self._excerpt(sent[at : at + _AROUND])} "
            f"({len(expected)} tokens expected from token {span.start} on, {len(sent)} sent)"
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
                return f"turn {span.turn}: the text of messages[{index}] does not occur in the tokens, or not in order"
            at = found + len(content)
        return None


def _expected_appended(
    renderer: PlainRenderer, messages: Sequence[Message], tools: Tools | None, ids: list[int], span: PromptSpan
) -> list[_Expected]:
    """Method 1: the rest of the whole rendering, if that begins with the ledger's tokens and a stop token ends the completion."""
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
    """Method 2: the tokens that follow the completion in the rendering, whatever the completion's text is."""
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
    """Yield the possible stop tokens of the completion in a rendering: the first one, and the one that it really ended with."""
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

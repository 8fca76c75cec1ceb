"""Probe a chat template: render a few conversations when its tokenizer is loaded, and see how it closes completions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, takewhile
from typing import Final

from rollout_server.core.message import JSON
from rollout_server.edge.tokens.chat_template import Literals
from rollout_server.edge.tokens.encoding import common_prefix
from rollout_server.edge.tokens.rendering_form import Arguments, Fields
from rollout_server.edge.tokens.short_form import shortened
from rollout_server.edge.tokens.turn_boundary import Render, RenderedTurn, environment_text, new_mark, try_render
from rollout_server.runtime.errors import RolloutFailed

_CONTENT = "Qf7xSaidByTheModel"
_USER: Fields = {"role": "user", "content": "Hello"}
_ASSISTANT: Fields = {"role": "assistant", "content": _CONTENT}
_CALL_ID = "a1b2c3d4"  # with a number appended, 9 characters: Mistral's templates refuse ids of another length
_ROLES = ("user", "assistant", "tool", "system")
_LONGEST_EXAMPLE = 160
_END = 8
"""In characters: as much of the end of a completion's syntax is compared."""
_LONGEST_COUNT = 32
_NO_LITERALS: Final = Literals()
_VALUE: Final[Fields] = {"value": {"type": "string", "description": "What to look at."}}
_PARAMETERS: Final[Fields] = {"type": "object", "properties": _VALUE, "required": ["value"]}
_LOOK: Final[Fields] = {"name": "look", "description": "Looks at something.", "parameters": _PARAMETERS}
TOOL: Final[Fields] = {"type": "function", "function": _LOOK}
"""The tool that the probe's conversations call. Some tokenizers have a separate template for conversations with tools."""


@dataclass(frozen=True, slots=True)
class StopToken:
    """The special token that a template writes after a completion.

    `opens_next` is True if the token also begins the next message and appears only if there is one. GLM works this way: a
    completion ends with `<|user|>` or `<|observation|>`.
    """

    text: str
    id: int
    opens_next: bool = False


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """Result of the probe.

    Args:
        final: the stop token of a completion without tool calls; None if no special token closes it.
        calls: the stop token of a completion with tool calls. Some templates use a different one there (gpt-oss: `<|call|>`).
        arguments: the forms of tool call arguments that the template accepts.
        short_form: True if, in all probed conversations, the environment is the same after a short and after the full history.
        inside: ids of special tokens that the template writes inside completions, such as the end of a tool call.
        refusal: why the template cannot be used, with an example; empty if it can.
        later_system: True if a system message behind other messages is rendered there.
        needs_names: True if tool results need the name of their tool, see `_needs_names`.
        needs_content: True if completions with tool calls need content, see `_needs_content`.
    """

    final: StopToken | None
    calls: StopToken | None
    arguments: frozenset[Arguments]
    short_form: bool = False
    refusal: str = ""
    inside: frozenset[int] = frozenset()
    later_system: bool = False
    needs_names: bool = False
    needs_content: bool = False

    @property
    def stops(self) -> tuple[StopToken, ...]:
        """The stop tokens that exist."""
        return tuple(stop for stop in (self.final, self.calls) if stop is not None)

    @property
    def preferred(self) -> Arguments:
        """The form of arguments to use: as received, unless the template accepts only objects."""
        return Arguments.PARSED if self.arguments == {Arguments.PARSED} else Arguments.RECEIVED

    def stop(self, *, calls: bool) -> StopToken | None:
        """Return the stop token of a completion with or without tool calls."""
        return self.calls if calls else self.final


def probe(
    render: Render,
    special: Mapping[int, str],
    eos: int | None = None,
    tooled: Render | None = None,
    literals: Literals | None = _NO_LITERALS,
) -> TemplateTraits:
    """Render completions with and without tool calls (docs/design.md, R2, R3 and R6a).

    Args:
        render: renders without tools.
        special: texts of special tokens by id.
        eos: id of the tokenizer's `eos_token`. Templates often close completions with another token.
        tooled: renders with `TOOL`; None: use `render`.
        literals: literals of the template; None if unknown, in which case the short form is not used.
    """
    render = _remembering(render)
    tooled = render if tooled is None else _remembering(tooled)
    refusal = _refusal(render)
    if refusal and not _refusal(tooled):  # the template works only with tools
        render, refusal = tooled, ""
    closers = _Closers(special, eos)
    final = closers.stop(render, [_USER, _ASSISTANT], _USER)
    named = _needs_names(tooled)
    rounds = {form: _round(1, form, _CONTENT, named=named) for form in Arguments}
    texts = {form: try_render(tooled, [_USER, *messages]) for form, messages in rounds.items()}
    accepted = frozenset(form for form, text in texts.items() if text is not None)
    shown = [rounds[form] for form, text in texts.items() if _CONTENT in (text or "")]
    # Templates that do not render calls may still close completions with calls by another token.
    hidden = [] if shown else [[{**rounds[form][0], "content": _CONTENT}, rounds[form][1]] for form in accepted]
    left_open = final is not None and closers.leaves_open(render, [_USER, _ASSISTANT])
    found = (closers.stop(tooled, [_USER, call], result, left_open=left_open) for call, result in shown or hidden)
    calls = next((stop for stop in found if stop is not None), None if shown else final)
    first = TemplateTraits(final, calls, accepted, refusal=refusal, needs_names=named)
    short = literals is not None and all(_short_form_holds(each, first, literals) for each in {render, tooled})
    inside = frozenset(index for each in {render, tooled} for index in _inside(each, first, special))
    later_system = _renders_later_system(render, final)
    content = _needs_content(tooled, named=named)
    return replace(first, short_form=short, inside=inside, later_system=later_system, needs_content=content)


class _Closers:
    """Find the stop token in rendered completions."""

    def __init__(self, special: Mapping[int, str], eos: int | None) -> None:
        self._stops = {text: StopToken(text, index) for index, text in special.items() if text}
        self._eos = "" if eos is None else special.get(eos, "")
        longest_first = sorted(self._stops, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def stop(
        self, render: Render, conversation: Sequence[Fields], following: Fields, *, left_open: bool = False
    ) -> StopToken | None:
        """Return the special token that ends the assistant message `conversation[-1]`; None if no special token ends it.

        After a message a template may write several special tokens, whether or not another message follows. DeepSeek writes
        `<｜tool▁calls▁end｜><｜end▁of▁sentence｜>` after tool calls: the first ends the calls, the second the completion. If `eos`
        is among them, `eos` is the stop token; otherwise the last one that belongs to this message.

        GLM has no such token. Its models stop with the token that begins the next message (`<|user|>`, `<|observation|>`),
        which is the first special token before the content of `following`. `left_open`: a final completion has no special token
        behind it unless a message follows, so special tokens directly after a tool call only end the call.
        """
        text = _behind(try_render(render, [*conversation, following]))
        if text is None:
            return None
        found = list(self._any.finditer(text))
        alone = try_render(render, conversation, generation_prompt=False) or ""
        ends = self._ends(alone)
        # Special tokens that follow the content with and without a next message belong to this message.
        own = [match[0] for match, end in takewhile(lambda pair: pair[0][0] == pair[1], zip(found, ends, strict=False))]
        if not own or left_open:
            opening = self._opening(text, following, len(own))
            if opening is not None and not own and self._is_in_header(render, conversation, following, opening):
                return None
            if opening is not None:
                only_before_next = left_open or not ends
                opens_next = only_before_next and self._names_role(render, conversation, following, opening, len(own))
                return replace(opening, opens_next=True) if opens_next else self._last_if_eos(text, opening)
            if not own:
                return None
        # A token that begins messages closes none: the template may append a message of its own to any conversation (Command R+).
        begins = self._any.match(_requested_prompt(render, alone, conversation).lstrip())
        own[1:] = takewhile(lambda token: begins is None or token != begins[0], own[1:])
        if self._eos in own:
            return self._stops[self._eos]
        # Some templates write a generation prompt even if none is requested: its special tokens do not close this message.
        closing = own[: max(1, len(ends) - len(self._any.findall(_generation_prompt(render, alone, conversation))))]
        return self._stops[closing[-1]]

    def _last_if_eos(self, text: str, opening: StopToken) -> StopToken:
        """Return `eos` if only special tokens and white space stand between `opening` and it in the text, otherwise `opening`."""
        behind = text[text.find(opening.text) :]
        ends = re.match(rf"(?:\s|{self._any.pattern})*?{re.escape(self._eos)}", behind) if self._eos else None
        return self._stops[self._eos] if ends else opening

    def leaves_open(self, render: Render, conversation: Sequence[Fields]) -> bool:
        """Return whether no special token follows the content of the last message."""
        return not self._ends(try_render(render, conversation, generation_prompt=False) or "")

    def _ends(self, alone: str) -> Sequence[str]:
        return self._any.findall(_behind(alone) or "")

    def _opening(self, text: str, following: Fields, start: int) -> StopToken | None:
        """Return the first special token before the content of `following`, apart from the first `start` ones; None without any."""
        begins = text.find(str(following["content"]))
        behind = (self._stops[match[0]] for match in self._any.finditer(text) if match.end() <= begins)
        return next(islice(behind, start, None), None)

    def _is_in_header(
        self, render: Render, conversation: Sequence[Fields], following: Fields, opening: StopToken
    ) -> bool:
        """Return whether text of the next message stands between the completion and its first special token.

        The end of a completion may be plain text, and a header may begin with the name of a role: `user<|role_sep|>`. What the
        template writes behind a completion that nothing follows is not text of the next message. Before its end may be more, such
        as the ids of calls (Apriel). A template may leave the last message open. Then text that is the same in front of messages of
        all roles is not text of the next one.
        """
        alone = try_render(render, conversation, generation_prompt=False) or ""
        between, own = self._between(render, conversation, following, opening), _behind(alone)
        if own is None or between is None or (own.strip() and between.endswith(own.rstrip()[-_END:])):
            return False
        others = ({**following, "role": role} for role in _ROLES if role != following["role"])
        texts = {self._between(render, conversation, other, opening) for other in others} - {None}
        return bool(between[common_prefix(own, between) :].strip()) and texts != {between}

    def _between(
        self, render: Render, conversation: Sequence[Fields], following: Fields, opening: StopToken
    ) -> str | None:
        """Return the text from the completion to the token `opening`, without white space at its end; None if it is not there."""
        text = _behind(try_render(render, [*conversation, following]))
        return None if text is None or opening.text not in text else text[: text.find(opening.text)].rstrip()

    def _names_role(
        self, render: Render, conversation: Sequence[Fields], following: Fields, opening: StopToken, start: int
    ) -> bool:
        """Return whether a message of another role has another token in this place, or the template refuses all of them.

        A template may leave the last message open. The token that it writes behind any other one then belongs to that message.
        """
        others = ({**following, "role": role} for role in _ROLES if role != following["role"])
        texts = ((other, _behind(try_render(render, [*conversation, other]))) for other in others)
        openings = {self._opening(text, other, start) for other, text in texts if text is not None}
        return openings - {None} != {opening}


def _generation_prompt(render: Render, alone: str, conversation: Sequence[Fields]) -> str:
    """Return the generation prompt at the end of `alone` that the template writes although none was requested; else ""."""
    if alone != try_render(render, conversation):
        return ""
    prompt = try_render(render, conversation[:-1]) or ""
    return alone[len(alone) - common_prefix(prompt[::-1], alone[::-1]) :]


def _requested_prompt(render: Render, alone: str, conversation: Sequence[Fields]) -> str:
    """Return the generation prompt that the template appends to `alone` if one is requested; else ""."""
    text = try_render(render, conversation) or ""
    return text[len(alone) :] if text.startswith(alone) else ""


def _behind(text: str | None) -> str | None:
    """Return the text after the last occurrence of the probe's content."""
    return text.rpartition(_CONTENT)[2] if text is not None and _CONTENT in text else None


def _short_form_holds(render: Render, probed: TemplateTraits, literals: Literals) -> bool:
    """Return whether each probed environment is the same after a short history."""
    seen = [
        same
        for messages, answered in _histories(probed, literals)
        if (same := _same(render, messages, answered, probed)) is not None
    ]
    return bool(seen) and all(seen)


def _same(render: Render, messages: Sequence[Fields], answered: int, probed: TemplateTraits) -> bool | None:
    """Return whether the environment is the same after a short history; None if the template refuses the conversation."""
    stop = probed.stop(calls="tool_calls" in messages[answered])
    turn = _rendered(render, messages, answered)
    if turn is None or stop is None:
        return None
    short = _rendered(render, *shortened(messages, answered, new_mark()))
    return short is not None and environment_text(turn, stop.text) == environment_text(short, stop.text)


def _inside(render: Render, probed: TemplateTraits, special: Mapping[int, str]) -> Iterator[int]:
    """Yield the special tokens between the prompt and the stop token, for completions with reasoning, content and calls."""
    call, result = _round(1, probed.preferred, named=probed.needs_names)
    thought: Fields = {"reasoning_content": "Let me see."}
    both: Fields = {**call, "tool_calls": [*_calls(call), *_calls(_round(2, probed.preferred)[0])]}
    second: Fields = {**result, "tool_call_id": f"{_CALL_ID}2"}
    for completion, following in (
        ({**_ASSISTANT, **thought}, [_USER]),
        ({**call, **thought}, [result]),
        ({**call, "content": "Let me look."}, [result]),
        (both, [result, second]),
    ):
        turn = _rendered(render, [_USER, completion, *following], 1)
        stop = probed.stop(calls="tool_calls" in completion)
        text = None if turn is None or stop is None else environment_text(turn, stop.text)
        if turn is None or stop is None or text is None:
            continue
        end = len(turn.full) - len(text) - len(stop.text)
        written = turn.full[common_prefix(turn.prompt, turn.full) : end]
        yield from (index for index, token in special.items() if token and token in written)


def _renders_later_system(render: Render, final: StopToken | None) -> bool:
    """Return whether system messages are rendered where they stand: behind a completion, and right before one."""
    first: Fields = {"role": "system", "content": "Be brief."}
    middle, last = ({"role": "system", "content": f"{new_mark()} is the time."} for _ in range(2))
    text = try_render(render, [first, _USER, _ASSISTANT, middle, _USER, last]) or ""
    places = [text.find(str(message["content"])) for message in (_ASSISTANT, middle, last)]
    if -1 in places or places != sorted(places):
        return False
    turn = _rendered(render, [_USER, _ASSISTANT, middle], 1)
    added = None if turn is None or final is None else environment_text(turn, final.text)
    return final is None or str(middle["content"]) in (added or "")


def _needs_names(render: Render) -> bool:
    """Return whether the template needs the name of the tool in a tool result.

    It does if it refuses a result without a name, or if it then writes the same text with an empty place (or Python's or JSON's
    word for nothing) where the name was. A template that writes anything else tests for a name, and is content without one: it
    gets the messages as they are, as the server of an engine would pass them.
    """
    name = new_mark()
    for form in Arguments:
        call, result = _round(1, form)
        for following in ([], [_ASSISTANT, _USER]):
            bare = try_render(render, [_USER, call, result, *following])
            text = try_render(render, [_USER, call, {**result, "name": name}, *following])
            if text is None:
                continue
            empty = (text.replace(name, ""), text.replace(name, "None"), text.replace(f'"{name}"', "null"))
            if bare is None or (name in text and bare in empty):
                return True
    return False


def _needs_content(render: Render, *, named: bool) -> bool:
    """Return whether the template refuses a tool call without content, and accepts one whose content is empty.

    APIs write `null` as the content of a completion that has only tool calls.
    """
    for call, result in (_round(1, form, named=named) for form in Arguments):
        bare = {**call, "content": None}
        if try_render(render, [_USER, call, result]) is not None and try_render(render, [_USER, bare, result]) is None:
            return True
    return False


def _calls(message: Fields) -> Sequence[JSON]:
    calls = message["tool_calls"]
    return calls if isinstance(calls, list) else []


def _rendered(render: Render, messages: Sequence[Fields], answered: int) -> RenderedTurn | None:
    full, prompt = try_render(render, messages), try_render(render, messages[:answered])
    return None if full is None or prompt is None else RenderedTurn(render, messages, answered, full, prompt)


def _histories(probed: TemplateTraits, literals: Literals) -> Iterator[tuple[list[Fields], int]]:
    """Yield conversations with the index of the completion that an environment follows.

    The last conversations are long, because a template may count messages. It can only compare the count with numbers that are
    written in it, so the longest conversation exceeds the largest of those numbers.
    """
    system: Fields = {"role": "system", "content": "Be brief."}
    thought: Fields = {**_ASSISTANT, "reasoning_content": "Let me see."}
    for start in ([_USER], [system, _USER], [_USER, thought, _USER]):
        rounds = [_round(number, probed.preferred, named=probed.needs_names) for number in (1, 2, 3)]
        rounds[1][0] = {**rounds[1][0], "content": "Let me look."}
        for messages in accumulate(rounds, initial=list(start)):
            if len(messages) > len(start):
                yield messages, len(messages) - 2
            yield [*messages, _ASSISTANT, _USER], len(messages)
    most = max((number for number in literals.numbers if number <= _LONGEST_COUNT), default=1)
    for rounds in ([_round(1, probed.preferred, named=probed.needs_names)], [[_ASSISTANT, _USER]]):
        for count in range(1, most + 4):
            messages = [_USER, *rounds[0] * count]
            yield messages, len(messages) - 2


def _round(number: int, form: Arguments, content: str = "x", *, named: bool = False) -> list[Fields]:
    """Return a tool call and its result, `named`: with the name of the tool."""
    arguments: JSON = f'{{"value": "{content}"}}' if form is Arguments.RECEIVED else {"value": content}
    call: JSON = {
        "id": f"{_CALL_ID}{number}",
        "type": "function",
        "function": {"name": "look", "arguments": arguments},
    }
    result: Fields = {"role": "tool", "tool_call_id": f"{_CALL_ID}{number}", "content": f"seen {number}"}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {**result, "name": "look"} if named else result,
    ]


def _refusal(render: Render) -> str:
    try:
        render([_USER], True)
        text = render([_USER, _ASSISTANT, _USER], True)
    except RolloutFailed as failed:
        return f"{failed.failure.message} (tried with {_USER['content']!r} from a user, a completion, and the message again)"
    if _CONTENT in text:
        return ""
    shown = text[-_LONGEST_EXAMPLE:]
    return f"the chat template drops earlier messages: the completion {_CONTENT!r} is missing in {shown!r}"


def _remembering(render: Render) -> Render:
    """Return `render` with a memory. A probe renders half of its conversations more than once, and each takes milliseconds."""
    known: dict[str, str | RolloutFailed] = {}

    def remembered(messages: Sequence[Fields], generation_prompt: bool) -> str:
        key = json.dumps([messages, generation_prompt])
        if key not in known:
            try:
                known[key] = render(messages, generation_prompt)
            except RolloutFailed as failed:
                known[key] = failed
        found = known[key]
        if isinstance(found, RolloutFailed):
            raise found
        return found

    return remembered

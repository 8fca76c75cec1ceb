"""The text after a completion, determined by a template's twin. Only transformers and Jinja are used, nothing of the renderer."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeAlias

from tests.hostile.templates.framing import FRAMINGS
from tests.hostile.templates.grammar import MARK, Template
from tests.hostile.templates.vocabulary import single

Message: TypeAlias = Mapping[str, Any]
_DATE: Final = re.compile(r'strftime_now\(("(?:[^"\\]|\\.)*")\)')


class Refused(Exception):
    """The template refuses the conversation."""


@dataclass(frozen=True, slots=True)
class Exact:
    """The ids after a completion: the stop token that it lacks, if any, and the environment."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Undecidable:
    """The template renders the conversation, but the end of this completion has no defined position."""

    reason: str


Truth: TypeAlias = Exact | Undecidable


@dataclass(frozen=True, slots=True)
class Split:
    """A rendering, split at a completion: its text, its stop, and the rest. All are None if it has no position.

    `closing`: the end of `answer` that is not its own text. `prompt`: the rendering of the messages before it.
    """

    full: str
    answer: str | None = None
    stop: str | None = None
    behind: str | None = None
    closing: str = ""
    prompt: str | None = None


class Oracle:
    """Judge of one template. Messages are JSON texts. `named`: results get the names of their tools before they are rendered."""

    def __init__(
        self, template: Template, tools: Sequence[Message] | None, date: datetime, *, named: bool = False
    ) -> None:
        self.template, self._tools, self._adds_names = template, tools, named
        self._tokenizer = copy.copy(template.vocabulary)

        def dated(match: re.Match[str]) -> str:
            return json.dumps(date.strftime(json.loads(match[1])), ensure_ascii=False)

        self._plain = _DATE.sub(dated, template.text)
        self._twin = _DATE.sub(dated, template.twin)
        self._ends = frozenset(single(self._tokenizer, template.ends).values())
        others = [] if template.traits.config == "known" else set(template.words.every) - template.inside
        self._special = frozenset(single(self._tokenizer, template.words.every).values())
        self._may_end = frozenset(single(self._tokenizer, others).values())

    def prompt(self, messages: Sequence[str]) -> tuple[int, ...]:
        """The ids of a conversation with a generation prompt. Raises `Refused`."""
        return self.encode(self.text(messages))

    def text(self, messages: Sequence[str], *, twin: bool = False, generation_prompt: bool = True) -> str:
        """The conversation rendered by the template or its twin. Raises `Refused`."""
        given = [self._given(text) for text in messages]
        given = [_named(given, index) for index in range(len(given))] if self._adds_names else given
        source = self._twin if twin else self._plain
        options: Any = {"tools": self._tools, "tokenize": False, "add_generation_prompt": generation_prompt}
        try:
            return str(self._tokenizer.apply_chat_template(given, chat_template=source, **options))
        except Exception as error:  # a template may raise anything
            raise Refused(f"{type(error).__name__}: {error}") from error

    def split(self, messages: Sequence[str], answered: int, *, generation_prompt: bool = True) -> Split:
        """The rendering at the completion `messages[answered]`. Raises `Refused`."""
        full = self.text(messages, generation_prompt=generation_prompt)
        marked = self.text(messages, twin=True, generation_prompt=generation_prompt)
        if MARK.sub("", marked) != full:
            raise AssertionError("a twin renders another text than its template")
        places = {match[1]: match.span() for match in MARK.finditer(marked) if int(match[2]) == answered}
        if len(places) < 4:
            return Split(full, MARK.sub("", marked[places["A"][1] :]) if "A" in places else None)
        (_, begins), (_, said), (ends, stop), (stopped, behind) = (places[name] for name in "ABSE")
        texts = marked[begins:ends], marked[stop:stopped], marked[behind:], marked[said:ends]
        return Split(full, *(MARK.sub("", text) for text in texts), self._before(messages[:answered]))

    def _before(self, messages: Sequence[str]) -> str | None:
        try:
            return self.text(messages)
        except Refused:
            return None

    def truth(
        self, split: Split, ids: Sequence[int] | None, *, cut: bool = False, message: Message | None = None
    ) -> Truth:
        """The ids after a completion with these ids. None means that the trainer sent no ids, so its stop is unknown.

        `cut`: the completion was truncated by length. `message`: the completion as a message.
        """
        if split.stop is None or split.behind is None:
            return Undecidable("the answer is not rendered")
        if not any(self.template.stops):
            return self._after_text(split, ids, (message or {}).get("content"))
        if not split.stop:
            return Undecidable("the answer is not closed where it ends")
        return self._after_stop(split, ids, cut, message or {})

    def _after_stop(self, split: Split, ids: Sequence[int] | None, cut: bool, message: Message) -> Truth:
        """The ids after a completion that the template closes with a stop."""
        texts = [text for text in message.values() if isinstance(text, str)]
        stop, behind = str(split.stop), str(split.behind)
        closing, *environment = self.encode(stop + behind)
        if self.encode(stop) != (closing,):
            raise AssertionError(f"{stop!r} is not one token")
        known = self._after_more(behind, environment, self._more(ids, closing, texts))
        if known is not None:
            return known
        if reason := self._open_question(ids, cut):
            return Undecidable(reason)
        # Without ids, assume that the completion has the stop of its kind.
        if not (closing in self._ends if ids is None else self._closed(ids, closing, cut)):
            text = self._missing(split, ids or (), cut, message)
            if text is None:
                return Undecidable("the completion does not end like its message")
            return Exact((*self._closing(split, ids or (), text), *environment))
        other = bool(ids) and ids[-1] != closing  # the stop itself may also begin the next message
        twice = bool(other and ids and environment and ids[-1] == environment[0] and self._is_syntax(ids[-1]))
        return Exact(tuple(environment[twice:]))

    def _missing(self, split: Split, ids: Sequence[int], cut: bool, message: Message) -> str | None:
        """What a completion that was cut, or ended otherwise, lacks of the text before the stop; None if nothing tells."""
        length = len(ids)
        while length and ids[length - 1] in self._special:
            length -= 1
        if not cut and not (self._opens_next and length < len(ids)):
            return ""
        stop_at = len(split.full) - len(f"{split.stop}{split.behind}")
        shown, said = split.full[:stop_at], f"{split.prompt}{self.decode(ids)}"
        if split.prompt is not None and shown.startswith(said):
            return shown.removeprefix(said)
        return self._missing_behind(split, (self.decode(ids), self.decode(ids[:length])), message)

    @staticmethod
    def _missing_behind(split: Split, texts: tuple[str, str], message: Message) -> str | None:
        """What a completion with another rendering lacks. `texts`: all of it, and without special tokens at its end."""
        content, own = message.get("content"), str(split.answer).removesuffix(split.closing)
        if isinstance(content, str) and content.strip() and not message.get("tool_calls"):
            behind = own[len(own.rstrip()) :] + split.closing
            found = [_behind(text, content.rstrip()[-16:], behind) for text in texts]
            return next((rest for rest in found if rest is not None), None if behind.strip() else "")
        thought = any(message.get(name) for name in ("reasoning_content", "reasoning", "thinking"))
        if split.closing.strip() or thought:
            return None
        end, shown = texts[1].rstrip()[-16:], f"{own}{split.closing}"
        space = shown[len(shown.rstrip()) :]
        return _behind(texts[1], end, space) if end and shown.rstrip().endswith(end) else ""

    def _closing(self, split: Split, ids: Sequence[int], missing: str) -> tuple[int, ...]:
        """The ids of the missing text and the stop, encoded behind the completion if no token spans its end."""
        before = f"{split.prompt or ''}{self.decode(ids)}"[-16:]
        for start in (before, "\n") if missing else ():
            first, whole = self.encode(start), self.encode(f"{start}{missing}{split.stop}")
            if whole[: len(first)] == first:
                return whole[len(first) :]
        return self.encode(f"{missing}{split.stop}")

    def _after_text(self, split: Split, ids: Sequence[int] | None, content: Any) -> Truth:
        """The ids after a completion that no token closes. A part of the text that separates it may be its own."""
        behind = str(split.behind)
        if ids is None:
            return Exact(self.encode(behind))
        written = self.decode(ids)
        if split.prompt is not None and split.full.startswith(split.prompt + written):
            return Exact(self.encode(split.full.removeprefix(split.prompt + written)))
        _, is_there, more = written.rpartition(content) if isinstance(content, str) and content else ("", "", "")
        if is_there and behind.startswith(more):
            return Exact(self.encode(behind.removeprefix(more)))
        if any(written.endswith(behind[:length]) for length in range(1, len(behind) + 1)):
            return Undecidable("the completion may have ended a line of the template")
        return Exact(self.encode(behind))

    def _more(self, ids: Sequence[int] | None, closing: int, texts: Sequence[str]) -> tuple[int, ...]:
        """The ids behind the stop of a completion, if neither they nor the stop are text of the message."""
        if not ids or closing not in ids[-16:]:
            return ()
        at = len(ids) - 1 - list(reversed(ids)).index(closing)
        more, end = tuple(ids[at + 1 :]), self.decode(ids[at:]).rstrip()
        if any(text.rstrip().endswith(end) for text in texts):
            return ()
        return more if all(map(self._is_syntax, more)) else ()

    def _after_more(self, behind: str, environment: Sequence[int], more: tuple[int, ...]) -> Truth | None:
        """The ids after a completion with a stop and something behind it, which the template may write too; None if it does not."""
        space = self.decode(more)
        if more and tuple(environment[: len(more)]) == more:
            return Exact(tuple(environment[len(more) :]))
        if not space.isspace():
            return None
        if behind.startswith(space):
            return Exact(self.encode(behind.removeprefix(space)))
        return None

    def _is_syntax(self, token_id: int) -> bool:
        return token_id in self._special or self.decode([token_id]).isspace()

    def _open_question(self, ids: Sequence[int] | None, cut: bool) -> str:
        """Why it is undecidable whether a completion with these ids has its stop; empty if it is decidable."""
        if not ids or ids[-1] in self._ends:
            return ""
        unknown = ids[-1] in self._may_end and not cut and self.template.traits.last == "open"
        return "nothing says whether the token at its end ends it: the last answer is left open" if unknown else ""

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a text, without special tokens added."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        return str(self._tokenizer.decode(list(ids)))

    def _closed(self, ids: Sequence[int], closing: int, cut: bool) -> bool:
        """Whether the completion has its stop, or another end token in its place.

        Without a generation config, every special token counts that templates do not write inside completions. If the stop
        is the first token of the next message, it also names that message's role, so no other token can replace it.
        """
        if not ids or not (ids[-1] in self._ends or (ids[-1] in self._may_end and not cut)):
            return False
        return ids[-1] == closing or not self._opens_next

    @property
    def _opens_next(self) -> bool:
        return FRAMINGS[self.template.traits.framing].next_begins

    def _given(self, text: str) -> Message:
        """A message as a trainer passes it to its template: arguments as text, or as objects if the template requires it."""
        message: dict[str, Any] = json.loads(text)
        calls = message.get("tool_calls")
        if self.template.arguments == "object" and calls:
            message["tool_calls"] = [_with_object(call) for call in calls]
        return message


def _behind(text: str, own: str, behind: str) -> str | None:
    """The end of `behind` that a text lacks which ends with `own`; None if it ends otherwise."""
    parts = [(behind[:at], behind[at:]) for at in range(len(behind) + 1)]
    for part, rest in parts:
        if text.endswith(own + part):
            return rest
    for part, rest in reversed(parts):
        if text.endswith(part) and text.removesuffix(part).rstrip().endswith(own):
            return rest
    return None


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        value = json.loads(function["arguments"])
    except (TypeError, ValueError):
        return call
    return {**call, "function": {**function, "arguments": value}} if isinstance(value, dict) else call


def _named(messages: Sequence[Message], index: int) -> Message:
    """The message; a result with the name of the only tool that the completion before it called under its id."""
    message = messages[index]
    if message["role"] != "tool" or message.get("name"):
        return message
    completion = next((each for each in reversed(messages[:index]) if each["role"] == "assistant"), {})
    calls = completion.get("tool_calls") or ()
    names = {call["function"]["name"] for call in calls if call["id"] == message["tool_call_id"]}
    return {**message, "name": names.pop()} if len(names) == 1 else message

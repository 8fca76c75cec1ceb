"""One rollout's rendering: what our side expects the trainer to put in front of each answer, and to count there.

Two renderings are never mixed (docs/design.md, R6). The truth is what really stands between an answer and the next one, found
by cutting the text behind the answer's stop token. The count is how much longer a full rendering of the conversation got,
less what the model wrote; trainers of the masked HTTP dialect count so, also where templates rewrite what was said before,
and a mask must have that length. Where the two differ there is drift.

A count needs the whole conversation rendered in each turn, and what changed of it encoded. The truth alone is rendered behind a
short history, as long as `ShortFormProof` has seen that this gives the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import datetime

from rollout_server.core.ledger import Prediction, Tokens, pack_tokens
from rollout_server.core.message import JSON, Message
from rollout_server.core.outcome import Category, Failure
from rollout_server.core.record import Answered
from rollout_server.edge.tokens.chat_template import Literals
from rollout_server.edge.tokens.encoding import Encoded
from rollout_server.edge.tokens.rendering_form import CountingMethod, Fields, RenderingForm, has_calls, parsed
from rollout_server.edge.tokens.short_form import ShortFormProof, shortened
from rollout_server.edge.tokens.template_probe import StopToken
from rollout_server.edge.tokens.tokenizer import Frame, LoadedTokenizer
from rollout_server.edge.tokens.turn_boundary import (
    RenderedTurn,
    environment_text,
    likely_environment,
    new_mark,
    text_after_completion,
    unseen_messages,
)
from rollout_server.runtime.errors import RolloutFailed

# Arguments of transformers' own, which a request must not set by naming a template variable like them.
_RESERVED = frozenset(
    {
        *("self", "conversation", "conversations", "messages", "tools", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """What stands between the last answer and the next one.

    Args:
        predicted: the truth, in tokens; before the first answer the whole prompt is `environment`.
        mask_length: the count; may be negative. None before the first answer and where the last one came without ids.
        exact: False where the template gave no place to cut, so that `predicted` is the end of a full encoding.
        unseen: the indices of messages behind the answer whose text the template does not show there.
        short_form_dropped: in this turn the short form differed from the full rendering, so it is used no more.
    """

    predicted: Prediction
    mask_length: int | None = None
    exact: bool = True
    unseen: Sequence[int] = ()
    short_form_dropped: bool = False


@dataclass(frozen=True, slots=True)
class _RenderedPrompt:
    """A conversation that was rendered: its messages, parsed too, and its text and tokens."""

    messages: tuple[Message, ...] = ()
    parsed: tuple[Fields, ...] = ()
    encoded: Encoded = field(default_factory=Encoded)

    @property
    def length(self) -> int:
        """In tokens."""
        return len(self.encoded.ids)


@dataclass(frozen=True, slots=True)
class TurnToRender:
    """A turn to render.

    Args:
        messages: the conversation of this turn.
        last: the answer before, which is `messages[answered]`; None in the first turn.
        answered: how many messages had been asked for then.
    """

    messages: tuple[Message, ...]
    last: Answered | None = None
    answered: int = 0


@dataclass(frozen=True, slots=True)
class _EnvironmentText:
    """The text between an answer and the next one. `stop` is the token in front of it; None where the template writes none."""

    text: str
    stop: StopToken | None


class Renderer:
    """Renders the conversation of one rollout, in the tokenizer's threads. What it remembers of texts only saves work."""

    def __init__(
        self,
        loaded: LoadedTokenizer,
        tools: Sequence[Fields],
        template_kwargs: Mapping[str, JSON],
        *,
        form: RenderingForm | None = None,
        date: datetime | None = None,
    ) -> None:
        """Tools as OpenAI writes function tools.

        `form` is how the trainer is known to render. `date` is what templates that print it take for now, in all turns.
        Raises `RolloutFailed` for template arguments that are not the template's.
        """
        if reserved := sorted(_RESERVED & template_kwargs.keys()):
            reason = f"chat template arguments cannot be named {', '.join(reserved)}"
            raise RolloutFailed(Failure(Category.VALIDATION, reason))
        self.loaded = loaded.switched(template_kwargs)
        self.form = form or RenderingForm(arguments=self.loaded.probed.preferred)
        self._tools = tools
        self._frame = Frame(None, template_kwargs, date or datetime.now())
        self._seen = _RenderedPrompt()
        self._parsed: tuple[tuple[Message, ...], tuple[Fields, ...]] = (), ()
        self._text: tuple[tuple[Message, ...], str] = (), ""
        self._proof = ShortFormProof(self.loaded.literals or Literals())
        self._filler = new_mark()
        self._taught = False

    def fork(self) -> Renderer:
        """The renderer of a conversation that goes on from here on its own."""
        other = copy(self)
        other._proof = self._proof.fork()
        return other

    async def predict(self, messages: Sequence[Message], last: Answered | None, last_messages: int) -> Rendered:
        """Renders a turn: `TurnToRender` says what the arguments are.

        Raises:
            Failed: VALIDATION for content that is not text, TOKENIZER where the template refuses the conversation.
        """
        return await self.loaded.run(self._predict, TurnToRender(tuple(messages), last, last_messages))

    async def append(self, messages: Sequence[Message], last: Answered | None, last_messages: int) -> Rendered:
        """The truth of a turn without its count: where the template allows, at a cost that does not grow with the history.

        Raises `RolloutFailed` as `predict` does, and (TOKENIZER) where the template gives no place to cut.
        """
        return await self.loaded.run(self._append, TurnToRender(tuple(messages), last, last_messages))

    async def learn(self, predicted: Prediction, reported: Tokens) -> Prediction:
        """Compares the prompt that was predicted last with the one that the trainer reports for it.

        Some trainers render without the tools, or with parsed arguments. If that explains a difference, later turns are
        rendered so too. Returns the prediction, corrected where it was that of a whole prompt.
        """
        if self._taught or reported == self._seen.encoded.ids:
            return predicted
        return await self.loaded.run(self._learn, predicted, reported)

    async def counts(
        self, messages: Sequence[Message], last: Answered, last_messages: int
    ) -> Mapping[RenderingForm, int]:
        """How many tokens trainers that render or count in another way find new, by form, each number once.

        Forms that differ least come first. Raises `RolloutFailed` as `predict` does.
        """
        return await self.loaded.run(self._counts, TurnToRender(tuple(messages), last, last_messages))

    def adopt(self, form: RenderingForm) -> None:
        """The trainer was found to render and count in this form."""
        self.form, self._taught = form, True
        self._forget()

    def _forget(self) -> None:
        self._seen, self._parsed, self._text = _RenderedPrompt(), ((), ()), ((), "")

    def _predict(self, turn: TurnToRender) -> Rendered:
        before, last = self._seen, turn.last
        prompt = self._seen = self._prompt(turn.messages, self.form, before)
        if last is None:
            return Rendered(Prediction(pack_tokens(), prompt.encoded.ids))
        if before.messages != turn.messages[: turn.answered]:
            text = self._render(prompt.parsed[: turn.answered], True)
            before = _RenderedPrompt(encoded=self.loaded.grow(prompt.encoded, text))
        full = RenderedTurn(self._render, prompt.parsed, turn.answered, prompt.encoded.text, before.encoded.text)
        found = self._environment(full, self._likely(prompt.parsed, turn.answered))
        truth = None if found is None else self._prediction(found, last, prompt.encoded)
        longer = None if last.token_ids is None else prompt.length - before.length - len(last.token_ids)
        if found is None or truth is None:
            ids = prompt.encoded.ids
            added = Prediction(pack_tokens(), ids[len(ids) - max(longer or 0, 0) :])
            return Rendered(added, longer, exact=False)
        if longer is not None and self.form.measure is CountingMethod.APPENDED:
            longer = len(truth.closing) + len(truth.environment)
        return Rendered(truth, longer, unseen=unseen_messages(full, found.text))

    def _append(self, turn: TurnToRender) -> Rendered:
        last, answered, fields = turn.last, turn.answered, self._fields(turn.messages)
        if last is None:
            self._text = turn.messages, self._render(fields, True)
            return Rendered(Prediction(pack_tokens(), self.loaded.grow(Encoded(), self._text[1]).ids))
        short, due = None, True
        if self.loaded.probed.short_form and self._proof.usable:
            due = self._proof.due(fields, answered)
            short = self._short_turn(fields, answered)
        likely = None if short is None else self._environment(short)
        if likely is not None and self._filler in likely.text:
            likely = None
        if short is not None and likely is not None and not due:
            unseen = [index + answered - short.answered for index in unseen_messages(short, likely.text)]
            return self._appended(likely, last, unseen)
        full = self._full_turn(turn, fields)
        found = self._environment(full, None if likely is None else likely.text)
        if found is None:
            raise RolloutFailed(_no_turn_boundary())
        rendered = self._appended(found, last, unseen_messages(full, found.text))
        if likely is None:
            return rendered
        if likely == found:
            self._proof.equal()
            return rendered
        self._proof.differs()
        return replace(rendered, short_form_dropped=True)

    def _full_turn(self, turn: TurnToRender, fields: Sequence[Fields]) -> RenderedTurn:
        """The whole conversation as text. The prompt of the last answer is known where the turn before was rendered in full."""
        known, prompt = self._text
        if known != turn.messages[: turn.answered]:
            prompt = self._render(fields[: turn.answered], True)
        text = self._render(fields, True)
        self._text = turn.messages, text
        return RenderedTurn(self._render, fields, turn.answered, text, prompt)

    def _appended(self, found: _EnvironmentText, last: Answered, unseen: Sequence[int]) -> Rendered:
        truth = self._prediction(found, last)
        if truth is None:
            raise RolloutFailed(_no_turn_boundary())
        return Rendered(truth, unseen=unseen)

    def _environment(self, turn: RenderedTurn, hint: str | None = None) -> _EnvironmentText | None:
        """What follows the last answer; None where its place cannot be told."""
        stop = self.loaded.probed.stop(calls=has_calls(turn.messages[turn.answered]))
        text = None if stop is None else environment_text(turn, stop.text, hint)
        if text is not None:
            return _EnvironmentText(text, stop)
        text = text_after_completion(turn)
        if text is None:
            return None
        # In a template that has a stop, only another special token shows that the answer has ended. It is part of the environment:
        # the first token of GLM's messages is also what ends the answer before.
        first = self.loaded.encode(text)[:1]
        return _EnvironmentText(text, None) if stop is None or (first and self.loaded.is_special(first[0])) else None

    def _prediction(self, found: _EnvironmentText, last: Answered, prompt: Encoded | None = None) -> Prediction | None:
        """An environment in tokens, with the stop in front where the answer lacks it.

        It is encoded behind the stop, because there are tokens that strip what follows them. Where the encoding of `prompt` falls
        apart at the stop, the ids are at its end.
        """
        stop = found.stop
        if stop is None:
            ids = self.loaded.encode(found.text)
            is_there = last.token_ids and last.token_ids[-1:] == ids[:1] and self.loaded.is_special(ids[0])
            return Prediction(pack_tokens(), ids[1:] if is_there else ids)
        start = 0 if prompt is None else len(prompt.text) - len(found.text) - len(stop.text)
        known = None if prompt is None else prompt.behind(stop.id, start)
        if known is not None:
            return Prediction(self._closing(stop, last), known)
        ids = self.loaded.encode(stop.text + found.text)
        return Prediction(self._closing(stop, last), ids[1:]) if ids[:1] == pack_tokens([stop.id]) else None

    def _likely(self, messages: Sequence[Fields], answered: int) -> str | None:
        """The environment behind a short history, as a hint at what it is behind the whole one."""
        stop = self.loaded.probed.stop(calls=has_calls(messages[answered]))
        turn = self._short_turn(messages, answered, checked=False) if self.loaded.probed.short_form else None
        return None if stop is None or turn is None else likely_environment(turn, stop.text)

    def _short_turn(self, messages: Sequence[Fields], answered: int, *, checked: bool = True) -> RenderedTurn | None:
        """The turn behind a short history; None where the template refuses it. Unless `checked`, without the prompt's text."""
        short, at = shortened(messages, answered, self._filler)
        try:
            prompt = self._render(short[:at], True) if checked else ""
            return RenderedTurn(self._render, short, at, self._render(short, True), prompt)
        except RolloutFailed:
            return None

    def _prompt(self, messages: tuple[Message, ...], form: RenderingForm, before: _RenderedPrompt) -> _RenderedPrompt:
        """The conversation in a form. `before` is an earlier prompt, in any form."""
        if form.arguments is self.form.arguments:
            fields = self._fields(messages)
        else:
            fields = tuple(parsed(message, index, form.arguments) for index, message in enumerate(messages))
        text = self.loaded.text(fields, self._framed(form))
        return _RenderedPrompt(messages, fields, self.loaded.grow(before.encoded, text))

    def _fields(self, messages: tuple[Message, ...]) -> tuple[Fields, ...]:
        """The messages, parsed in our form: those that are known from the turn before are not parsed again."""
        known, fields = self._parsed
        if messages[: len(known)] != known:
            fields = ()
        more = (parsed(messages[index], index, self.form.arguments) for index in range(len(fields), len(messages)))
        fields = (*fields, *more)
        self._parsed = messages, fields
        return fields

    def _framed(self, form: RenderingForm) -> Frame:
        return replace(self._frame, tools=form.convert_tools(self._tools))

    def _render(self, messages: Sequence[Fields], generation_prompt: bool) -> str:
        return self.loaded.text(messages, self._framed(self.form), generation_prompt=generation_prompt)

    def _closing(self, stop: StopToken, last: Answered) -> Tokens:
        """The stop, if the answer lacks one: it was cut, or the engine keeps stops to itself."""
        if last.token_ids is None:
            return pack_tokens()
        cut = last.finish_reason == "length"
        ended = last.token_ids and self.loaded.ends_completion(last.token_ids[-1], cut=cut)
        return pack_tokens() if ended else pack_tokens([stop.id])

    def _learn(self, predicted: Prediction, reported: Tokens) -> Prediction:
        seen = self._seen
        with_calls = any(map(has_calls, seen.parsed))
        self._taught = with_calls  # a prompt with calls shows all that there is to see
        for form in self.form.others():
            if form.measure is not self.form.measure or (form.arguments is not self.form.arguments and not with_calls):
                continue
            try:
                prompt = self._prompt(seen.messages, form, seen)
            except RolloutFailed:
                continue
            if prompt.encoded.ids == reported:
                self.form, self._seen, self._parsed = form, prompt, (prompt.messages, prompt.parsed)
                return Prediction(pack_tokens(), reported) if predicted.environment == seen.encoded.ids else predicted
        return predicted

    def _counts(self, turn: TurnToRender) -> Mapping[RenderingForm, int]:
        kept, sent = self.form, self._predict(turn).mask_length
        seen, fields, found = self._seen, self._parsed, dict[RenderingForm, int]()
        try:
            for form in kept.others():
                self.form = form
                self._forget()
                try:
                    length = self._predict(turn).mask_length
                except RolloutFailed:
                    continue
                if length is not None and length >= 0 and length not in (sent, *found.values()):
                    found[form] = length
        finally:
            self.form, self._seen, self._parsed = kept, seen, fields
        return found


def _no_turn_boundary() -> Failure:
    reason = (
        "the chat template shows no place at which the last answer ends, so nobody can say which tokens follow it; "
        "use message mode, or a template that closes answers with a special token"
    )
    return Failure(Category.TOKENIZER, reason)

"""One rollout's rendering: what our side expects the trainer to put in front of each answer, and to count there.

Two renderings are never mixed (tokens.md, R6). The truth is what really stands between an answer and the next one, found
by cutting the text behind the answer's stop token. The count is how much longer a full rendering of the conversation got,
less what the model wrote; trainers of the masked HTTP dialect count so, also where templates rewrite what was said before,
and a mask must have that length. Where the two differ there is drift.

Each turn renders the whole conversation once, encodes what changed of it, and renders a short stand-in for it twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from rollout_server.core.ledger import Prediction, Tokens, pack_tokens
from rollout_server.core.message import JSON, Message
from rollout_server.core.outcome import Category, Failure
from rollout_server.core.record import Answered
from rollout_server.edge.tokens.cut import environment_text, stands_behind, text_after_answer
from rollout_server.edge.tokens.encoding import Encoded
from rollout_server.edge.tokens.form import Fields, Form, Measure, has_calls, parsed
from rollout_server.edge.tokens.loaded import Frame, LoadedTokenizer
from rollout_server.edge.tokens.mirror import mirror_length, mirrored
from rollout_server.edge.tokens.probe import Stop
from rollout_server.runtime.port import Failed

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
    """

    predicted: Prediction
    mask_length: int | None
    exact: bool = True


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A conversation that was rendered: its messages, parsed too, and its text and tokens."""

    messages: tuple[Message, ...] = ()
    parsed: tuple[Fields, ...] = ()
    encoded: Encoded = field(default_factory=Encoded)

    @property
    def length(self) -> int:
        """In tokens."""
        return len(self.encoded.ids)


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn to render.

    Args:
        messages: the conversation of this turn.
        last: the answer before, which is `messages[answered]`; None in the first turn.
        answered: how many messages had been asked for then.
    """

    messages: tuple[Message, ...]
    last: Answered | None = None
    answered: int = 0


class Renderer:
    """Renders the conversation of one rollout, in the tokenizer's threads. What it remembers of texts only saves work."""

    def __init__(
        self,
        loaded: LoadedTokenizer,
        tools: Sequence[Fields],
        template_kwargs: Mapping[str, JSON],
        *,
        form: Form | None = None,
        date: datetime | None = None,
    ) -> None:
        """Tools as OpenAI writes function tools.

        `form` is how the trainer is known to render. `date` is what templates that print it take for now, in all turns.
        Raises `Failed` for template arguments that are not the template's.
        """
        if reserved := sorted(_RESERVED & template_kwargs.keys()):
            reason = f"chat template arguments cannot be named {', '.join(reserved)}"
            raise Failed(Failure(Category.VALIDATION, reason))
        self.loaded = loaded.switched(template_kwargs)
        self.form = form or Form(arguments=self.loaded.probed.preferred)
        self._tools = tools
        self._frame = Frame(None, template_kwargs, date or datetime.now())
        self._seen = _Prompt()
        self._taught = False

    async def predict(self, messages: Sequence[Message], last: Answered | None, last_messages: int) -> Rendered:
        """Renders a turn: `Turn` says what the arguments are.

        Raises:
            Failed: VALIDATION for content that is not text, TOKENIZER where the template refuses the conversation.
        """
        return await self.loaded.run(self._predict, Turn(tuple(messages), last, last_messages))

    async def append(self, messages: Sequence[Message], last: Answered | None, last_messages: int) -> Prediction | None:
        """The truth of a turn without its count: where the template allows, at a cost that does not grow with the history.

        None where the template gives no place to cut. Raises `Failed` as `predict` does.
        """
        return await self.loaded.run(self._append, Turn(tuple(messages), last, last_messages))

    async def learn(self, predicted: Prediction, reported: Tokens) -> Prediction:
        """Compares the prompt that was predicted last with the one that the trainer reports for it.

        Some trainers render without the tools, or with parsed arguments. If that explains a difference, later turns are
        rendered so too. Returns the prediction, corrected where it was that of a whole prompt.
        """
        if self._taught or reported == self._seen.encoded.ids:
            return predicted
        return await self.loaded.run(self._learn, predicted, reported)

    async def counts(self, messages: Sequence[Message], last: Answered, last_messages: int) -> Mapping[Form, int]:
        """How many tokens trainers that render or count in another way find new, by form, each number once.

        Forms that differ least come first. Raises `Failed` as `predict` does.
        """
        return await self.loaded.run(self._counts, Turn(tuple(messages), last, last_messages))

    def adopt(self, form: Form) -> None:
        """The trainer was found to render and count in this form."""
        self.form, self._taught, self._seen = form, True, _Prompt()

    def _predict(self, turn: Turn) -> Rendered:
        before = self._seen
        prompt = self._seen = self._prompt(turn.messages, self.form, before)
        if turn.last is None:
            return Rendered(Prediction(pack_tokens(), prompt.encoded.ids), None)
        before = self._asked_before(prompt, before, turn)
        truth = self._truth(prompt, before, turn.last, turn.answered)
        longer = None if turn.last.token_ids is None else prompt.length - before.length - len(turn.last.token_ids)
        if truth is None:
            ids = prompt.encoded.ids
            added = Prediction(pack_tokens(), ids[len(ids) - max(longer or 0, 0) :])
            return Rendered(added, longer, exact=False)
        if longer is not None and self.form.measure is Measure.APPENDED:
            longer = len(truth.closing) + len(truth.environment)
        return Rendered(truth, longer)

    def _append(self, turn: Turn) -> Prediction | None:
        if turn.last is not None and self.loaded.probed.mirrors:
            short = self._append_short(turn, turn.last)
            if short is not None:
                return short
        rendered = self._predict(turn)
        return rendered.predicted if rendered.exact else None

    def _append_short(self, turn: Turn, last: Answered) -> Prediction | None:
        """What follows the answer, behind a mirrored history. That this is the same was seen when the tokenizer was loaded."""
        before, form = turn.messages[: turn.answered], self.form.arguments
        system = [parsed(message, 0, form) for message in before[:1] if message.role in ("system", "developer")]
        behind = turn.messages[turn.answered :]
        new = [parsed(message, turn.answered + place, form) for place, message in enumerate(behind)]
        fields = [*system, *new]
        stop = self.loaded.probed.stop(calls=has_calls(new[0]))
        text = None if stop is None else self._mirrored(fields, stop, len(system))
        if stop is None or text is None:
            return None
        ids = self.loaded.encode(stop.text + text)
        return Prediction(self._closing(stop, last), ids[1:]) if ids[:1] == pack_tokens([stop.id]) else None

    def _prompt(self, messages: tuple[Message, ...], form: Form, before: _Prompt) -> _Prompt:
        """The conversation in a form. `before` is an earlier prompt, in any form."""
        known = len(before.messages) if messages[: len(before.messages)] == before.messages else 0
        if form.arguments is not self.form.arguments:
            known = 0
        fresh = (parsed(messages[i], i, form.arguments) for i in range(known, len(messages)))
        fields = (*before.parsed[:known], *fresh)
        text = self.loaded.text(fields, self._framed(form))
        return _Prompt(messages, fields, self.loaded.grow(before.encoded, text))

    def _framed(self, form: Form) -> Frame:
        return replace(self._frame, tools=form.given(self._tools))

    def _asked_before(self, prompt: _Prompt, before: _Prompt, turn: Turn) -> _Prompt:
        """The prompt of the last answer; `before` if it is that one."""
        if before.messages == turn.messages[: turn.answered]:
            return before
        text = self.loaded.text(prompt.parsed[: turn.answered], self._framed(self.form))
        return _Prompt(encoded=self.loaded.grow(prompt.encoded, text))

    def _truth(self, prompt: _Prompt, before: _Prompt, last: Answered, answered: int) -> Prediction | None:
        full = prompt.encoded.text
        stop = self.loaded.probed.stop(calls=has_calls(prompt.parsed[answered]))
        if stop is None:
            text = text_after_answer(self._render, prompt.parsed, answered, full)
            return None if text is None else Prediction(pack_tokens(), self.loaded.encode(text))
        text = self._short_cut(prompt, stop, answered)
        if text is None:
            text = environment_text(self._render, prompt.parsed, answered + 1, stop.text, full)
        if text is None or not stands_behind(text, full, before.encoded.text):
            return None
        ids = self._behind(stop, text, prompt)
        return None if ids is None else Prediction(self._closing(stop, last), ids)

    def _behind(self, stop: Stop, text: str, prompt: _Prompt) -> Tokens | None:
        """The ids of an environment's text: those at the end of the prompt, where its encoding falls apart at the stop.

        Elsewhere it is encoded behind the stop, because there are tokens that strip what follows them.
        """
        known = prompt.encoded.behind(stop.id, len(prompt.encoded.text) - len(text) - len(stop.text))
        if known is not None:
            return known
        ids = self.loaded.encode(stop.text + text)
        return ids[1:] if ids[:1] == pack_tokens([stop.id]) else None

    def _short_cut(self, prompt: _Prompt, stop: Stop, answered: int) -> str | None:
        """The environment as it stands behind a mirrored history, if the real prompt ends so too."""
        text = self._mirrored(prompt.parsed, stop, answered) if self.loaded.probed.mirrors else None
        return text if text is not None and prompt.encoded.text.endswith(stop.text + text) else None

    def _mirrored(self, messages: Sequence[Fields], stop: Stop, answered: int) -> str | None:
        short = mirrored(messages, answered)
        try:
            full = self._render(short, True)
        except Failed:
            return None
        return environment_text(self._render, short, mirror_length(messages, answered), stop.text, full)

    def _render(self, messages: Sequence[Fields], generation_prompt: bool) -> str:
        return self.loaded.text(messages, self._framed(self.form), generation_prompt=generation_prompt)

    def _closing(self, stop: Stop, last: Answered) -> Tokens:
        if last.token_ids is None:
            return pack_tokens()
        ended = last.token_ids and self.loaded.ends_answer(last.token_ids[-1], cut=last.finish_reason == "length")
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
            except Failed:
                continue
            if prompt.encoded.ids == reported:
                self.form, self._seen = form, prompt
                return Prediction(pack_tokens(), reported) if predicted.environment == seen.encoded.ids else predicted
        return predicted

    def _counts(self, turn: Turn) -> Mapping[Form, int]:
        kept, sent = self.form, self._predict(turn).mask_length
        seen, found = self._seen, dict[Form, int]()
        try:
            for form in kept.others():
                self.form, self._seen = form, _Prompt()
                try:
                    length = self._predict(turn).mask_length
                except Failed:
                    continue
                if length is not None and length >= 0 and length not in (sent, *found.values()):
                    found[form] = length
        finally:
            self.form, self._seen = kept, seen
        return found

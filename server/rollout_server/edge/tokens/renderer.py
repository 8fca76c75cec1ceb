"""Render one rollout: predict the tokens before each completion, and the length of the mask that the trainer expects.

Two results are kept strictly apart (docs/design.md, R6):

- The truth: the token ids between a completion and the next one. They are found by cutting the rendered text after the
  completion's stop token, and go into the ledger.
- The count: the growth of the full rendering since the last turn, minus the number of generated tokens. Trainers of the
  synchronous HTTP API count this way, even if the template rewrites earlier messages, and accept only a mask of this length.

If the two differ, there is drift.

The count needs a rendering of the whole conversation in each turn, and the encoding of what changed. The truth alone can be
rendered after a short history, while `ShortFormProof` finds both results equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import datetime
from math import inf
from time import thread_time

from rollout_server.core.ledger import Prediction, Tokens, pack_tokens
from rollout_server.core.message import JSON, Message
from rollout_server.core.outcome import Category, Failure, FailureClass
from rollout_server.core.record import Answered
from rollout_server.edge.tokens.chat_template import Literals
from rollout_server.edge.tokens.completion_end import EnvironmentText, is_cut, predict_tokens
from rollout_server.edge.tokens.encoding import Encoded
from rollout_server.edge.tokens.rendering_form import (
    CountingMethod,
    Fields,
    RenderingForm,
    has_calls,
    parsed,
    strings,
    with_content,
    with_names,
)
from rollout_server.edge.tokens.short_form import ShortFormProof, shortened
from rollout_server.edge.tokens.tokenizer import Frame, LoadedTokenizer
from rollout_server.edge.tokens.turn_boundary import (
    RenderedTurn,
    environment_text,
    likely_environment,
    new_mark,
    repeats_completion,
    text_after_completion,
    try_render,
    unseen_messages,
)
from rollout_server.runtime.errors import RolloutFailed

# Arguments of `apply_chat_template` itself. A request must not set them through template variables of the same name.
_RESERVED = frozenset(
    {
        *("self", "conversation", "conversations", "messages", "tools", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)
_QUICK = 0.001
"""In seconds of CPU time."""
_FEW = 64
"""In messages: a turn may render all of them, which the turn before it did not."""
_ALL = 500_000
"""In characters of JSON, of all messages: to render them takes a few milliseconds."""
_SHORT = 2000
"""In characters of JSON. To encode them takes less than a millisecond."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The predicted tokens between the last completion and the next one.

    Args:
        predicted: the truth. In the first turn, `environment` is the whole prompt.
        mask_length: the count; may be negative. None in the first turn, and if the last completion came without token ids.
        exact: False if no turn boundary was found. `predicted` is then the tail of the full encoding, a guess. Also False if the
            completion may have a part of these tokens already, see `PredictedTokens`.
        unseen: indices of messages after the completion whose text the template does not show.
        repeated: the template writes text of the completion again behind its end, so the model sees it twice.
        short_form_dropped: in this turn the short form differed from the full rendering, so the rollout stops using it.
    """

    predicted: Prediction
    mask_length: int | None = None
    exact: bool = True
    unseen: Sequence[int] = ()
    repeated: bool = False
    short_form_dropped: bool = False


@dataclass(frozen=True, slots=True)
class _RenderedPrompt:
    """A rendered conversation: its messages, their parsed form, and its text and token ids."""

    messages: tuple[Message, ...] = ()
    parsed: tuple[Fields, ...] = ()
    encoded: Encoded = field(default_factory=Encoded)

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.encoded.ids)


@dataclass(frozen=True, slots=True)
class TurnToRender:
    """The input of one rendering.

    Args:
        messages: the conversation of this turn.
        last: the previous completion, which is `messages[answered]`; None in the first turn.
        answered: the number of messages in the prompt of the previous completion.
    """

    messages: tuple[Message, ...]
    last: Answered | None = None
    answered: int = 0


class Renderer:
    """Render the conversation of one rollout in the renderer threads. Cached texts save work and do not affect results."""

    def __init__(
        self,
        loaded: LoadedTokenizer,
        tools: Sequence[Fields],
        template_kwargs: Mapping[str, JSON],
        *,
        form: RenderingForm | None = None,
        date: datetime | None = None,
    ) -> None:
        """Create a renderer for one rollout.

        Args:
            loaded: the tokenizer.
            tools: in OpenAI's format for function tools.
            template_kwargs: template variables of the request.
            form: how the trainer is known to render and count; None: the template's preferred form.
            date: the time that templates print, the same in all turns; None: now.

        Raises `RolloutFailed` (VALIDATION) if `template_kwargs` names an argument of transformers.
        """
        if reserved := sorted(_RESERVED & template_kwargs.keys()):
            reason = f"chat template arguments cannot be named {', '.join(reserved)}"
            raise RolloutFailed(Failure(Category.VALIDATION, reason, source=FailureClass.ENVIRONMENT))
        self.loaded = loaded.switched(template_kwargs)
        self.form = form or RenderingForm(arguments=self.loaded.probed.preferred)
        self._tools = tools
        self._frame = Frame(None, template_kwargs, date or datetime.now())
        self._seen = _RenderedPrompt()
        self._parsed: tuple[tuple[Message, ...], tuple[Fields, ...]] = (), ()
        self._amended: tuple[tuple[Message, ...], tuple[Fields, ...]] = (), ()
        self._text: tuple[tuple[Message, ...], str] = (), ""
        self._short_prompt: tuple[tuple[RenderingForm, Sequence[Fields]] | None, str] = None, ""
        self._proof = ShortFormProof(self.loaded.literals or Literals())
        self._filler = new_mark()
        self._taught = False
        self._seconds = inf

    def fork(self, *, earlier: bool = False) -> Renderer:
        """Return a renderer for a conversation that branches off here, or after an earlier turn.

        An earlier one takes no caches, and this renderer may be in use meanwhile.
        """
        other = copy(self)
        if earlier:
            other._proof = ShortFormProof(self.loaded.literals or Literals())
            other._forget()
        else:
            other._proof = self._proof.fork()
        return other

    async def predict(self, messages: Sequence[Message], last: Answered | None, last_messages: int) -> Rendered:
        """Render a turn: truth and count. See `TurnToRender` for the arguments.

        Raises:
            RolloutFailed: VALIDATION for content that is not text, TOKENIZER if the template refuses the conversation.
        """
        return await self._run(self._predict, TurnToRender(tuple(messages), last, last_messages))

    async def append(self, messages: Sequence[Message], last: Answered | None, last_messages: int) -> Rendered:
        """Render the truth of a turn without the count. With most templates the cost does not grow with the history.

        Raises `RolloutFailed` as `predict` does, and (TOKENIZER) if no turn boundary is found.
        """
        return await self._run(self._append, TurnToRender(tuple(messages), last, last_messages))

    async def learn(self, predicted: Prediction, reported: Tokens) -> Prediction:
        """Compare the last predicted prompt with the one that the trainer reports.

        Some trainers render without tools, or with parsed arguments. If another form explains the difference, later turns use
        that form. Returns the prediction, corrected if it was the prediction of a whole prompt.
        """
        if self._taught or reported == self._seen.encoded.ids:
            return predicted
        return await self.loaded.run(self._learn, predicted, reported)

    async def counts(
        self, messages: Sequence[Message], last: Answered, last_messages: int
    ) -> Mapping[RenderingForm, int]:
        """Return the counts of trainers that render or count in another form; each number once, the most similar form first.

        Raises `RolloutFailed` as `predict` does.
        """
        return await self.loaded.run(self._counts, TurnToRender(tuple(messages), last, last_messages))

    @property
    def is_taught(self) -> bool:
        """Whether nothing is left to learn from what a trainer reports."""
        return self._taught

    def adopt(self, form: RenderingForm) -> None:
        """Use this form from now on, because the trainer was found to render and count this way."""
        self.form, self._taught = form, True
        self._forget()

    async def _run(self, render: Callable[[TurnToRender], Rendered], turn: TurnToRender) -> Rendered:
        """Render a turn on the event loop if it is short and the turn before it was quick, otherwise in a renderer thread.

        A hand-over to a thread takes as long as the rendering of a short turn. Only templates that the operator has chosen render
        on the event loop, because any other may take as long as it likes.
        """
        if self.loaded.is_trusted and self._seconds <= _QUICK and len(turn.messages) <= _FEW:
            sizes = [len(message.text) for message in turn.messages]
            if sum(sizes[turn.answered :]) <= _SHORT and sum(sizes) <= _ALL:
                return self._timed(render, turn)
        return await self.loaded.run(self._timed, render, turn)

    def _timed(self, render: Callable[[TurnToRender], Rendered], turn: TurnToRender) -> Rendered:
        started = thread_time()
        try:
            return render(turn)
        finally:
            self._seconds = thread_time() - started

    def _forget(self) -> None:
        self._seen, self._parsed, self._amended, self._text = _RenderedPrompt(), ((), ()), ((), ()), ((), "")

    def _predict(self, turn: TurnToRender) -> Rendered:
        before, last = self._seen, turn.last
        prompt = self._seen = self._prompt(turn.messages, self.form, before)
        if last is None:
            return Rendered(Prediction(pack_tokens(), prompt.encoded.ids))
        # The last rendered prompt is not the last completion's (after a fork or a change of form): render that one again.
        if before.messages != turn.messages[: turn.answered]:
            text = self._render(prompt.parsed[: turn.answered], True)
            before = _RenderedPrompt(encoded=self.loaded.grow(prompt.encoded, text))
        full = RenderedTurn(self._render, prompt.parsed, turn.answered, prompt.encoded.text, before.encoded.text)
        found = self._environment(full, self._likely(prompt.parsed, turn.answered))
        truth = None if found is None else predict_tokens(self.loaded, found, last, full, prompt.encoded)
        longer = None if last.token_ids is None else prompt.length - before.length - len(last.token_ids)
        if found is None or truth is None:
            ids = prompt.encoded.ids
            added = Prediction(pack_tokens(), ids[len(ids) - max(longer or 0, 0) :])
            return Rendered(added, longer, exact=False)
        if longer is not None and self.form.measure is CountingMethod.APPENDED:
            longer = len(truth.tokens.closing) + len(truth.tokens.environment)
        unseen, repeated = unseen_messages(full, found.text), repeats_completion(full, found.text)
        return Rendered(truth.tokens, longer, exact=truth.exact, unseen=unseen, repeated=repeated)

    def _append(self, turn: TurnToRender) -> Rendered:
        last, answered, fields = turn.last, turn.answered, self._amended_fields(turn.messages)
        if last is None:
            self._text = turn.messages, self._render(fields, True)
            return Rendered(Prediction(pack_tokens(), self.loaded.open(self._text[1]).ids))
        short, due = None, True
        if self.loaded.probed.short_form and self._proof.usable:
            due = self._proof.due(fields, answered)
            # What a cut completion lacks may depend on earlier messages, which no comparison has shown.
            short = None if is_cut(self.loaded, last) else self._short_turn(fields, answered)
        likely = None if short is None else self._environment(short)
        # The environment quotes the made-up user message, so it depends on text that the real conversation does not have.
        if likely is not None and self._filler in likely.text:
            likely = None
        if short is not None and likely is not None and not due:
            return self._appended(likely, last, short, answered - short.answered)
        full = self._full_turn(turn, fields)
        found = self._environment(full, None if likely is None else likely.text)
        if found is None:
            raise RolloutFailed(self._no_turn_boundary(full))
        rendered = self._appended(found, last, full)
        if likely is None:
            return rendered
        if likely == found and self._is_independent(fields, answered, found):
            self._proof.equal()
            return rendered
        self._proof.differs()
        return replace(rendered, short_form_dropped=True)

    def _is_independent(self, fields: Sequence[Fields], answered: int, found: EnvironmentText) -> bool:
        """Return whether the environment stays the same if the dropped messages are other ones.

        What the template refuses shows nothing.
        """
        end = f"{found.stop.text if found.stop else ''}{found.text}"
        for alternatives in self._proof.variations(fields, answered):
            text = next(filter(None, (try_render(self._render, each) for each in alternatives)), None)
            if text is not None and not text.endswith(end):
                return False
        return True

    def _full_turn(self, turn: TurnToRender, fields: Sequence[Fields]) -> RenderedTurn:
        """Render the whole conversation. The text of the last prompt is reused if the previous turn was rendered in full."""
        known, prompt = self._text
        if known != turn.messages[: turn.answered]:
            prompt = self._render(fields[: turn.answered], True)
        text = self._render(fields, True)
        self._text = turn.messages, text
        return RenderedTurn(self._render, fields, turn.answered, text, prompt)

    def _appended(self, found: EnvironmentText, last: Answered, turn: RenderedTurn, dropped: int = 0) -> Rendered:
        """Return the result for an environment that was found in `turn`, a history without its first `dropped` messages."""
        truth = predict_tokens(self.loaded, found, last, turn)
        if truth is None:
            raise RolloutFailed(self._no_turn_boundary(turn))
        unseen = [index + dropped for index in unseen_messages(turn, found.text)]
        return Rendered(truth.tokens, exact=truth.exact, unseen=unseen, repeated=repeats_completion(turn, found.text))

    def _environment(self, turn: RenderedTurn, hint: str | None = None) -> EnvironmentText | None:
        """Return the text after the last completion; None if the boundary cannot be determined."""
        stop = self.loaded.probed.stop(calls=has_calls(turn.messages[turn.answered]))
        text = None if stop is None else environment_text(turn, stop.text, hint)
        if stop is not None and text is not None:
            return EnvironmentText(text, stop)
        text = text_after_completion(turn)
        if text is None:
            return None
        # If the template has a stop token but none was found here, only another special token can prove that the completion ended.
        # That token is part of the environment: in GLM's template the first token of a message also ends the completion before it.
        first = self.loaded.encode(text)[:1]
        if stop is not None and not (first and self.loaded.is_special(first[0])):
            return None
        return EnvironmentText(text, None, stop is not None and self.loaded.ends_completion(first[0], cut=False))

    def _no_turn_boundary(self, turn: RenderedTurn) -> Failure:
        completion = turn.messages[turn.answered]
        stop = self.loaded.probed.stop(calls=has_calls(completion))
        if stop is None or has_calls(completion) or any(map(str.strip, strings(completion.get("content")))):
            reason = (
                "the chat template does not show where the last completion ends, so the environment's tokens are unknown; "
                "use message mode, or a template that closes completions with a special token"
            )
        else:
            reason = (
                f"the chat template closes completions with {stop.text}, but not the last one, which has no content and no "
                "tool calls, so the environment's tokens are unknown; use message mode, or end the rollout there"
            )
        return Failure(Category.TOKENIZER, reason)

    def _likely(self, messages: Sequence[Fields], answered: int) -> str | None:
        """Return the environment of the same turn after one made-up user message, as a hint for `environment_text`."""
        stop = self.loaded.probed.stop(calls=has_calls(messages[answered]))
        if stop is None or not self.loaded.probed.short_form:
            return None
        turn = [{"role": "user", "content": self._filler}, *messages[answered:]]
        return likely_environment(self._render, turn, 1, stop.text)

    def _short_turn(self, messages: Sequence[Fields], answered: int) -> RenderedTurn | None:
        """Return the turn after a short history; None if the template refuses it."""
        short, at = shortened(messages, answered, self._filler)
        try:
            prompt = self._short_prompt_text(short[:at])
            return RenderedTurn(self._render, short, at, self._render(short, True), prompt)
        except RolloutFailed:
            return None

    def _short_prompt_text(self, messages: Sequence[Fields]) -> str:
        """Render the kept history. It is the same in all turns between two user messages."""
        known, text = self._short_prompt
        if known != (self.form, messages):
            text = self._render(messages, True)
            self._short_prompt = (self.form, messages), text
        return text

    def _prompt(self, messages: tuple[Message, ...], form: RenderingForm, before: _RenderedPrompt) -> _RenderedPrompt:
        """Render the conversation in a form. `before` is an earlier prompt, in any form, whose encoding is reused."""
        if form.arguments is self.form.arguments:
            fields = self._fields(messages)
        else:
            fields = tuple(parsed(message, index, form.arguments) for index, message in enumerate(messages))
        text = self.loaded.text(fields, self._framed(form))
        encoded = self.loaded.grow(before.encoded, text) if before.messages else self.loaded.open(text)
        return _RenderedPrompt(messages, fields, encoded)

    def _fields(self, messages: tuple[Message, ...]) -> tuple[Fields, ...]:
        """Return the messages parsed in the current form; messages of the previous turn are not parsed again."""
        known, fields = self._parsed
        if messages[: len(known)] != known:
            fields = ()
        more = (parsed(messages[index], index, self.form.arguments) for index in range(len(fields), len(messages)))
        fields = (*fields, *more)
        self._parsed = messages, fields
        return fields

    def _amended_fields(self, messages: tuple[Message, ...]) -> tuple[Fields, ...]:
        """Return the parsed messages, with what the template needs and they lack: names in tool results, and empty content (R9).

        Only token mode does this: there the server alone decides what the model sees. Other trainers render the messages that they
        were sent, and those of the server's tools have no name.
        """
        fields, traits = self._fields(messages), self.loaded.probed
        if not (traits.needs_names or traits.needs_content):
            return fields
        known, amended = self._amended
        if messages[: len(known)] != known:
            amended = ()
        more: Iterable[Fields] = fields[len(amended) :]
        if traits.needs_content:
            more = map(with_content, more)
        if traits.needs_names:
            more = with_names(more, amended)
        self._amended = messages, (*amended, *more)
        return self._amended[1]

    def _framed(self, form: RenderingForm) -> Frame:
        return replace(self._frame, tools=form.convert_tools(self._tools))

    def _render(self, messages: Sequence[Fields], generation_prompt: bool) -> str:
        return self.loaded.text(messages, self._framed(self.form), generation_prompt=generation_prompt)

    def _learn(self, predicted: Prediction, reported: Tokens) -> Prediction:
        seen = self._seen
        with_calls = any(map(has_calls, seen.parsed))
        self._taught = with_calls  # once a prompt with tool calls was compared, nothing is left to learn
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

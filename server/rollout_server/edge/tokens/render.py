"""One rollout's rendering: what our side expects the trainer to put in front of each answer, and to count there.

Two renderings are never mixed (tokens.md, R6). The truth is what really stands between an answer and the next one, found
by cutting the text behind the answer's stop token. The count is how much longer a full rendering of the conversation got,
less what the model wrote; trainers of the masked HTTP dialect count so, also where templates rewrite what was said before,
and a mask must have that length. Where the two differ there is drift.

Each turn renders the whole conversation twice and encodes it once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from rollout_server.core.ledger import Prediction, Tokens, pack_tokens
from rollout_server.core.message import JSON, MalformedMessage, Message, parse_object
from rollout_server.core.outcome import Category, Failure
from rollout_server.core.record import Answered
from rollout_server.edge.tokens.cut import environment_text
from rollout_server.edge.tokens.loaded import Fields, Frame, LoadedTokenizer
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

# No tools in both ways of saying so, which some templates render differently.
_OTHER_TOOLS: tuple[tuple[Fields, ...] | None, ...] = (None, ())


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
class _Seen:
    """A conversation that was rendered: its messages, parsed too, and the tokens of the prompt."""

    messages: tuple[Message, ...] = ()
    parsed: tuple[Fields, ...] = ()
    length: int = 0


class Renderer:
    """Renders the conversation of one rollout, in the tokenizer's threads. What it remembers only saves work."""

    def __init__(
        self,
        loaded: LoadedTokenizer,
        tools: Sequence[Fields],
        template_kwargs: Mapping[str, JSON],
        *,
        date: datetime | None = None,
    ) -> None:
        """Tools as OpenAI writes function tools. `date` is what templates that print it take for now, in all turns.

        Raises `Failed` for template arguments that are not the template's.
        """
        if reserved := sorted(_RESERVED & template_kwargs.keys()):
            reason = f"chat template arguments cannot be named {', '.join(reserved)}"
            raise Failed(Failure(Category.VALIDATION, reason))
        self._loaded = loaded
        self._frame = Frame(tools or None, template_kwargs, date or datetime.now())
        self._seen = _Seen()

    async def predict(self, messages: Sequence[Message], last: Answered | None, last_messages: int) -> Rendered:
        """Renders a turn.

        Args:
            messages: the conversation of this turn.
            last: the answer before, which is `messages[last_messages]`; None in the first turn.
            last_messages: how many messages had been asked for then.

        Raises:
            Failed: VALIDATION for content that is not text, TOKENIZER where the template refuses the conversation.
        """
        return await self._loaded.run(self._predict, tuple(messages), last, last_messages)

    async def learn(self, messages: Sequence[Message], predicted: Prediction, reported: Tokens) -> Prediction:
        """Compares the first prompt with the one that the trainer reports for it, after the first answer.

        Some trainers render without the tools. If that explains the difference, later turns are rendered so too, and the
        corrected prediction is returned; otherwise `predicted`.
        """
        if predicted.environment == reported:
            return predicted
        return await self._loaded.run(self._learn, tuple(messages), predicted, reported)

    def _predict(self, messages: tuple[Message, ...], last: Answered | None, last_messages: int) -> Rendered:
        frame, before = self._frame, self._seen
        parsed = self._parse(messages, before)
        full = self._loaded.text(parsed, frame)
        ids = self._loaded.encode(full)
        self._seen = _Seen(messages, parsed, len(ids))
        if last is None:
            return Rendered(Prediction(pack_tokens(), ids), None)
        prompt = before.length
        if before.messages != messages[:last_messages]:
            prompt = len(self._loaded.encode(self._loaded.text(parsed[:last_messages], frame)))
        generated = last.token_ids
        mask_length = None if generated is None else len(ids) - prompt - len(generated)
        truth = self._truth(parsed, frame, full, last, last_messages)
        if truth is None:
            added = max(mask_length or 0, 0)
            return Rendered(Prediction(pack_tokens(), ids[len(ids) - added :]), mask_length, exact=False)
        return Rendered(truth, mask_length)

    def _truth(
        self, parsed: Sequence[Fields], frame: Frame, full: str, last: Answered, answered: int
    ) -> Prediction | None:
        stop = self._loaded.probed.calls if parsed[answered].get("tool_calls") else self._loaded.probed.final
        if stop is None:
            return None

        def render(messages: Sequence[Fields], generation_prompt: bool) -> str:
            return self._loaded.text(messages, frame, generation_prompt=generation_prompt)

        text = environment_text(render, parsed, answered + 1, stop.text, full)
        if text is None:
            return None
        # Encoded behind the stop, because there are tokens that strip what follows them.
        ids = self._loaded.encode(stop.text + text)
        if ids[:1] != pack_tokens([stop.id]):
            return None
        return Prediction(self._closing(stop, last), ids[1:])

    def _closing(self, stop: Stop, last: Answered) -> Tokens:
        if last.token_ids is None:
            return pack_tokens()
        ended = last.token_ids and self._loaded.ends_answer(last.token_ids[-1], cut=last.finish_reason == "length")
        return pack_tokens() if ended else pack_tokens([stop.id])

    def _learn(self, messages: tuple[Message, ...], predicted: Prediction, reported: Tokens) -> Prediction:
        parsed = self._parse(messages, self._seen)
        for tools in _OTHER_TOOLS:
            frame = replace(self._frame, tools=tools)
            try:
                ids = self._loaded.encode(self._loaded.text(parsed, frame))
            except Failed:
                continue
            if ids == reported:
                self._frame, self._seen = frame, _Seen(messages, parsed, len(ids))
                return Prediction(pack_tokens(), ids)
        return predicted

    def _parse(self, messages: tuple[Message, ...], seen: _Seen) -> tuple[Fields, ...]:
        known = len(seen.messages)
        if messages[:known] != seen.messages:
            known = 0
        objects = self._loaded.probed.objects_only
        return (*seen.parsed[:known], *(_fields(messages[i], i, objects) for i in range(known, len(messages))))


def _fields(message: Message, index: int, objects: bool) -> Fields:
    """The message as it was received; arguments as objects only if the template takes nothing else. Raises `Failed`."""
    fields = message.fields()
    content = fields.get("content")
    for place, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = str(part.get("type", "untyped"))[:40] if isinstance(part, Mapping) else type(part).__name__
            reason = f"messages[{index}].content[{place}] is not text ({kind}): images and the like cannot be counted in tokens"
            raise Failed(Failure(Category.VALIDATION, reason))
    calls = fields.get("tool_calls")
    if objects and isinstance(calls, list):
        return {**fields, "tool_calls": [_with_object(call) for call in calls]}
    return fields


def _with_object(call: JSON) -> JSON:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        return {**call, "function": {**function, "arguments": parse_object(arguments)}}
    except MalformedMessage:
        return call

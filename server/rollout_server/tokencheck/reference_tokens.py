"""The reference tokens: what an append-only rollout holds, which is the prompt and then completions and environments in turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from rollout_server.core.ledger import Tokens, pack_tokens
from rollout_server.edge.tokens.encoding import common_prefix
from rollout_server.edge.tokens.rendering_form import has_calls
from rollout_server.edge.tokens.short_form import shortened
from rollout_server.edge.tokens.turn_boundary import RenderedTurn, environment_text, new_mark, text_after_completion
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.tokencheck.conversation import CheckConversation
from rollout_server.tokencheck.model_output import ModelOutput, Writing, write_output
from rollout_server.tokencheck.template import RenderedConversation, Template, in_other_tokens


class Region(Enum):
    """The origin of a span of text."""

    PROMPT = "prompt"
    GENERATION_PROMPT = "generation prompt"
    COMPLETION = "completion"
    STOP = "stop"
    ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class ReferenceSpan:
    """A span of the text.

    `completion`: index of the assistant message that the span is or precedes. `count`: number of messages up to its end.
    """

    region: Region
    start: int
    end: int
    completion: int
    count: int


@dataclass(slots=True)
class ReferenceTokens:
    """The text so far with its token ids, spans, and the (start, end) of tool call arguments."""

    text: str = ""
    ids: Tokens = field(default_factory=pack_tokens)
    spans: list[ReferenceSpan] = field(default_factory=list)
    arguments: list[tuple[int, int]] = field(default_factory=list)

    def append(self, region: Region, text: str, completion: int, count: int) -> None:
        """Append a span of text. The caller appends its ids separately."""
        if text:
            self.spans.append(ReferenceSpan(region, len(self.text), len(self.text) + len(text), completion, count))
            self.text += text

    def at(self, offset: int) -> ReferenceSpan:
        """Return the span that contains a character; the last span for an offset after the end."""
        return next((span for span in self.spans if offset < span.end), self.spans[-1])


@dataclass(frozen=True, slots=True)
class ReferenceEnvironment:
    """The environment after a completion.

    Args:
        tokens: number of tokens, including a stop token that the completion lacked.
        short_form: whether the environment is the same after a short history; None if the short history gives no result.
    """

    tokens: int
    short_form: bool | None


class ReferenceBuilder:
    """Build the reference tokens of a conversation, turn by turn."""

    def __init__(
        self, template: Template, conversation: CheckConversation, rendering: RenderedConversation, writing: Writing
    ) -> None:
        """Start with the first prompt. `rendering` must use the form in which arguments are spelled as models write them.

        Raises `RolloutFailed` as `rendering` does.
        """
        self._template, self._conversation, self._rendering, self._writing = template, conversation, rendering, writing
        self.reference = ReferenceTokens()
        first = conversation.completions[0]
        text = rendering.prompt(first)
        self._last = rendering.encoded_prompt(first)
        self.reference.ids = self._last.ids
        self._append_prompt(Region.PROMPT, text, first, first)

    def append_completion(self, position: int) -> tuple[ModelOutput, Tokens]:
        """Append the completion. Returns the output and its token ids."""
        reference = self.reference
        output = write_output(self._template, self._rendering, self._conversation, position, self._writing)
        body, stop = output.text.removesuffix(output.stop), output.stop
        if position in self._conversation.cut:
            stop = ""
        ids = self._generated_ids(body, stop)
        reference.arguments += [
            (len(reference.text) + start, len(reference.text) + end) for start, end in output.arguments
        ]
        reference.append(Region.COMPLETION, body, position, position + 1)
        reference.append(Region.STOP, stop, position, position + 1)
        reference.ids = reference.ids + ids
        return output, ids

    def append_environment(self, position: int, ids: Tokens) -> ReferenceEnvironment | None:
        """Append the environment after a completion with these ids. Returns None if the turn boundary cannot be found."""
        end = self._conversation.end(position)
        rendering, probed, loaded = self._rendering, self._template.loaded.probed, self._template.loaded
        turn = RenderedTurn(
            rendering.render, rendering.messages[:end], position, rendering.prompt(end), rendering.prompt(position)
        )
        stop = probed.stop(calls=has_calls(rendering.messages[position]))
        closing, short = pack_tokens(), None
        if stop is None:
            text = text_after_completion(turn)
            if text is None:
                return None
            added = loaded.encode(text)
        else:
            text = environment_text(turn, stop.text)
            added = loaded.encode(stop.text + (text or ""))
            if text is None or added[:1] != pack_tokens([stop.id]):
                return None
            # Encoded after the stop token, because some added tokens strip white space after them (Phi-3).
            added = added[1:]
            if not loaded.is_closed(ids, stop, cut=position in self._conversation.cut):
                closing = pack_tokens([stop.id])
                self.reference.append(Region.STOP, stop.text, position, position + 1)
            short_text = _short_text(turn, stop.text)
            short = None if short_text is None else short_text == text
        self.reference.ids = self.reference.ids + closing + added
        self._append_prompt(Region.ENVIRONMENT, text, end, end)
        return ReferenceEnvironment(len(closing) + len(added), short)

    def _generated_ids(self, body: str, stop: str) -> Tokens:
        """Return the ids that a model generates for this text. Generated tokens never merge with the prompt's last token."""
        loaded, before = self._template.loaded, self.reference.ids
        self._last = loaded.grow(self._last, self.reference.text + body + stop)
        whole = self._last.ids
        ids = whole[len(before) :] if whole[: len(before)] == before else loaded.encode(body + stop)
        if self._writing is Writing.TOKENS:
            closing = loaded.encode(stop)
            other = in_other_tokens(self._template, body, ids[: len(ids) - len(closing)])
            return ids if other is None else other + closing
        return ids

    def _append_prompt(self, region: Region, text: str, completion: int, count: int) -> None:
        """Append text that ends with a generation prompt, as two spans."""
        prompt_text = self._rendering.prompt(count)
        prompt = len(prompt_text) - common_prefix(prompt_text, self._rendering.history(count))
        border = len(text) - min(prompt, len(text))
        self.reference.append(region, text[:border], completion, count)
        self.reference.append(Region.GENERATION_PROMPT, text[border:], completion, count)


def _short_text(turn: RenderedTurn, stop: str) -> str | None:
    messages, position = shortened(turn.messages, turn.answered, new_mark())
    try:
        full, prompt = turn.render(messages, True), turn.render(messages[:position], True)
    except RolloutFailed:
        return None
    return environment_text(RenderedTurn(turn.render, messages, position, full, prompt), stop)

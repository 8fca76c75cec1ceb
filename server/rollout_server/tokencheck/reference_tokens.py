"""What a rollout holds that keeps tokens: the prompt, then by turns what the model wrote and what came after it."""

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
    """Whose text it is."""

    PROMPT = "prompt"
    GENERATION_PROMPT = "generation prompt"
    COMPLETION = "completion"
    STOP = "stop"
    ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class ReferenceSpan:
    """A span of the text. `completion` is the index of the message that it is or that comes next; `count` messages end with it."""

    region: Region
    start: int
    end: int
    completion: int
    count: int


@dataclass(slots=True)
class ReferenceTokens:
    """The text so far, its ids and its spans, and from where to where in it arguments of calls stand."""

    text: str = ""
    ids: Tokens = field(default_factory=pack_tokens)
    spans: list[ReferenceSpan] = field(default_factory=list)
    arguments: list[tuple[int, int]] = field(default_factory=list)

    def append(self, region: Region, text: str, completion: int, count: int) -> None:
        """Adds a span of text; its ids are added by themselves."""
        if text:
            self.spans.append(ReferenceSpan(region, len(self.text), len(self.text) + len(text), completion, count))
            self.text += text

    def at(self, offset: int) -> ReferenceSpan:
        """The span that a character is in; the last one for offsets behind all."""
        return next((span for span in self.spans if offset < span.end), self.spans[-1])


@dataclass(frozen=True, slots=True)
class ReferenceEnvironment:
    """What came after an answer.

    Args:
        tokens: how many, a stop that the answer lacked included.
        short_form: whether rendering it behind a short history gives the same text; None where that gives no text.
    """

    tokens: int
    short_form: bool | None


class ReferenceBuilder:
    """Builds the reference tokens of a conversation, turn by turn."""

    def __init__(
        self, template: Template, conversation: CheckConversation, rendering: RenderedConversation, writing: Writing
    ) -> None:
        """`rendering` renders in the form in which arguments come out as models write them. Raises `RolloutFailed` as it does."""
        self._template, self._conversation, self._rendering, self._writing = template, conversation, rendering, writing
        self.reference = ReferenceTokens()
        first = conversation.completions[0]
        text = rendering.prompt(first)
        self._last = rendering.encoded_prompt(first)
        self.reference.ids = self._last.ids
        self._append_prompt(Region.PROMPT, text, first, first)

    def append_completion(self, position: int) -> tuple[ModelOutput, Tokens]:
        """Appends the completion; what was written, and its ids."""
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
        """Appends what comes after a completion of these ids. None where its place cannot be found."""
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
            added = added[1:]  # encoded behind the stop, because there are tokens that strip what follows them
            cut = position in self._conversation.cut
            if not (ids and loaded.ends_completion(ids[-1], cut=cut)):
                closing = pack_tokens([stop.id])
                self.reference.append(Region.STOP, stop.text, position, position + 1)
            short_text = _short_text(turn, stop.text)
            short = None if short_text is None else short_text == text
        self.reference.ids = self.reference.ids + closing + added
        self._append_prompt(Region.ENVIRONMENT, text, end, end)
        return ReferenceEnvironment(len(closing) + len(added), short)

    def _generated_ids(self, body: str, stop: str) -> Tokens:
        """What a model generates for that text. Its tokens do not reach back into the prompt."""
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
        """Appends text that ends with a generation prompt, as two pieces."""
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

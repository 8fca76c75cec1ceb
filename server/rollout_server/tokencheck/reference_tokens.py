"""What a rollout holds that keeps tokens: the prompt, then by turns what the model wrote and what came after it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from rollout_server.core.ledger import Tokens, pack_tokens
from rollout_server.edge.tokens.encoding import common_prefix
from rollout_server.edge.tokens.rendering_form import has_calls
from rollout_server.edge.tokens.short_form import shortened
from rollout_server.edge.tokens.turn_boundary import RenderedTurn, environment_text, new_mark, text_after_completion
from rollout_server.runtime.ports import RolloutFailed
from rollout_server.tokencheck.conversation import CheckConversation
from rollout_server.tokencheck.model_output import ModelOutput, Writing, written
from rollout_server.tokencheck.template import RenderedConversation, Template, in_other_tokens


class Region(Enum):
    """Whose text it is."""

    PROMPT = "prompt"
    GENERATION_PROMPT = "generation prompt"
    ANSWER = "answer"
    STOP = "stop"
    ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class ReferencePiece:
    """A piece of the text. `answer` is the index of the answer that it is or that comes next; it ends after `count` messages."""

    region: Region
    start: int
    end: int
    answer: int
    count: int


@dataclass(slots=True)
class ReferenceTokens:
    """The text so far, its ids and its pieces, and from where to where in it arguments of calls stand."""

    text: str = ""
    ids: Tokens = field(default_factory=pack_tokens)
    pieces: list[ReferencePiece] = field(default_factory=list)
    arguments: list[tuple[int, int]] = field(default_factory=list)

    def append(self, region: Region, text: str, answer: int, count: int) -> None:
        """Adds a piece of text; its ids are added by themselves."""
        if text:
            self.pieces.append(ReferencePiece(region, len(self.text), len(self.text) + len(text), answer, count))
            self.text += text

    def at(self, place: int) -> ReferencePiece:
        """The piece that a character stands in; the last one for places behind all."""
        return next((piece for piece in self.pieces if place < piece.end), self.pieces[-1])


@dataclass(frozen=True, slots=True)
class ReferenceEnvironment:
    """What came after an answer.

    Args:
        tokens: how many, a stop that the answer lacked included.
        short_form: whether rendering it behind a short history gives the same text; None where that gives no text.
    """

    tokens: int
    short_form: bool | None


class ReferenceReader:
    """Tells the truth about a conversation, turn by turn."""

    def __init__(
        self, template: Template, conversation: CheckConversation, page: RenderedConversation, writing: Writing
    ) -> None:
        """`page` renders in the form in which arguments come out as models write them. Raises `RolloutFailed` as it does."""
        self._template, self._conversation, self._page, self._writing = template, conversation, page, writing
        self.truth = ReferenceTokens()
        first = conversation.answers[0]
        text = page.asked(first)
        self._last = page.encoded(first)
        self.truth.ids = self._last.ids
        self._prompted(Region.PROMPT, text, first, first)

    def answer(self, answered: int) -> tuple[ModelOutput, Tokens]:
        """Appends the answer; what was written, and its ids."""
        truth = self.truth
        said = written(self._template, self._page, self._conversation, answered, self._writing)
        body, stop = said.text.removesuffix(said.stop), said.stop
        if answered in self._conversation.cut:
            stop = ""
        ids = self._generated(body, stop)
        truth.arguments += [(len(truth.text) + start, len(truth.text) + end) for start, end in said.arguments]
        truth.append(Region.ANSWER, body, answered, answered + 1)
        truth.append(Region.STOP, stop, answered, answered + 1)
        truth.ids = truth.ids + ids
        return said, ids

    def environment(self, answered: int, ids: Tokens) -> ReferenceEnvironment | None:
        """Appends what comes after an answer of these ids. None where its place cannot be told."""
        end = self._conversation.end(answered)
        page, probed, loaded = self._page, self._template.loaded.probed, self._template.loaded
        turn = RenderedTurn(page.render, page.messages[:end], answered, page.asked(end), page.asked(answered))
        stop = probed.stop(calls=has_calls(page.messages[answered]))
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
            cut = answered in self._conversation.cut
            if not (ids and loaded.ends_completion(ids[-1], cut=cut)):
                closing = pack_tokens([stop.id])
                self.truth.append(Region.STOP, stop.text, answered, answered + 1)
            short_text = _short_text(turn, stop.text)
            short = None if short_text is None else short_text == text
        self.truth.ids = self.truth.ids + closing + added
        self._prompted(Region.ENVIRONMENT, text, end, end)
        return ReferenceEnvironment(len(closing) + len(added), short)

    def _generated(self, body: str, stop: str) -> Tokens:
        """What a model generates for that text. Its tokens do not reach back into the prompt."""
        loaded, before = self._template.loaded, self.truth.ids
        self._last = loaded.grow(self._last, self.truth.text + body + stop)
        whole = self._last.ids
        ids = whole[len(before) :] if whole[: len(before)] == before else loaded.encode(body + stop)
        if self._writing is Writing.TOKENS:
            closing = loaded.encode(stop)
            other = in_other_tokens(self._template, body, ids[: len(ids) - len(closing)])
            return ids if other is None else other + closing
        return ids

    def _prompted(self, region: Region, text: str, answer: int, count: int) -> None:
        """Appends text that ends with a generation prompt, as two pieces."""
        asked = self._page.asked(count)
        prompt = len(asked) - common_prefix(asked, self._page.ended(count))
        border = len(text) - min(prompt, len(text))
        self.truth.append(region, text[:border], answer, count)
        self.truth.append(Region.GENERATION_PROMPT, text[border:], answer, count)


def _short_text(turn: RenderedTurn, stop: str) -> str | None:
    messages, answered = shortened(turn.messages, turn.answered, new_mark())
    try:
        full, prompt = turn.render(messages, True), turn.render(messages[:answered], True)
    except RolloutFailed:
        return None
    return environment_text(RenderedTurn(turn.render, messages, answered, full, prompt), stop)

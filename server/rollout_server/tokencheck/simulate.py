"""Plays a conversation: at each boundary, what was there against what a trainer renders and counts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from rollout_server.core.message import MalformedMessage
from rollout_server.edge.tokens.rendering_form import Arguments, Fields, has_calls
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.tokencheck.boundary import SimulatedConversation, TurnBoundary
from rollout_server.tokencheck.conversation import CheckConversation, names_of, thought_of
from rollout_server.tokencheck.divergence import parting
from rollout_server.tokencheck.model_output import Writing
from rollout_server.tokencheck.reference_tokens import ReferenceReader
from rollout_server.tokencheck.template import RenderedConversation, Template

_SHOWN = 60
_NAMES = {"tool": "tool results", "system": "system messages", "user": "user messages"}


class Simulator:
    """Plays conversations with one template. `natural` is the form in which arguments come out as models write them."""

    def __init__(self, template: Template, natural: Arguments) -> None:
        self._template, self._natural = template, natural

    def play(
        self, conversation: CheckConversation, forms: Sequence[Arguments], writings: Iterable[Writing]
    ) -> Iterator[SimulatedConversation]:
        """The conversation as trainers see it that render arguments in each of the forms.

        A way of writing is left out where answers cannot be written so, or would not be written differently.
        """
        normal = conversation.normal()
        own, usual = (
            _RenderedForms(self._template, conversation),
            _RenderedForms(self._template, normal or conversation),
        )
        for writing in writings:
            if (normal == conversation) if writing is Writing.SPELLING else (normal is None):
                continue
            pages = own if writing is Writing.SPELLING else usual
            for form in forms:
                played = self._played(pages, form, writing)
                if played is not None:
                    yield played

    def _played(self, pages: _RenderedForms, form: Arguments, writing: Writing) -> SimulatedConversation | None:
        game = _Simulation(self._template, pages, (self._natural, form), writing)
        refused = ""
        try:
            game.play()
        except RolloutFailed as failed:
            refused = failed.failure.message.partition("refuses the conversation: ")[2] or failed.failure.message
        except MalformedMessage as error:
            refused = str(error)
        if not game.told:
            return None
        return SimulatedConversation(
            kind=pages.conversation.kind,
            form=form,
            writing=writing,
            boundaries=tuple(game.boundaries),
            refused=refused,
            uncut=tuple(game.uncut),
            left_out=frozenset(game.left_out),
            unprompted=game.unprompted,
        )


class _RenderedForms:
    """A conversation in each form, made when it is first looked at."""

    def __init__(self, template: Template, conversation: CheckConversation) -> None:
        self.conversation = conversation
        self._template = template
        self._made: dict[Arguments, RenderedConversation] = {}

    def of(self, form: Arguments) -> RenderedConversation:
        """Raises as `RenderedConversation` does."""
        if form not in self._made:
            self._made[form] = RenderedConversation(self._template, self.conversation, form)
        return self._made[form]


class _Simulation:
    """One conversation in one writing; `forms` are the natural one, which tells the truth, and the one that is compared with it."""

    def __init__(
        self, template: Template, pages: _RenderedForms, forms: tuple[Arguments, Arguments], writing: Writing
    ) -> None:
        self._template, self._pages, self._forms, self._writing = template, pages, forms, writing
        self._conversation = pages.conversation
        self.boundaries: list[TurnBoundary] = []
        self.uncut: list[int] = []
        self.left_out: set[str] = set()
        self.unprompted: tuple[str, str] | None = None
        self.told = True

    def play(self) -> None:
        """Raises `RolloutFailed` where the template refuses; what was found before stands."""
        conversation = self._conversation
        natural, form = self._forms
        page, truthful = self._pages.of(form), self._pages.of(natural)
        teller = ReferenceReader(self._template, conversation, truthful, self._writing)
        for answered in conversation.answers:
            end = conversation.end(answered)
            if answered + 1 == len(conversation.messages):
                break
            self._look(page, answered, end)
            said, ids = teller.answer(answered)
            if self._writing is Writing.SPELLING and not said.found:
                self.told = False  # a spelling of its own cannot be told in this template's way of writing calls
                return
            added = teller.environment(answered, ids)
            if added is None:
                self._uncut(page, answered, end)
                return
            counted = len(page.encoded(end).ids) - len(page.encoded(answered).ids) - len(ids)
            found = parting(self._template, conversation, page, teller.truth, end)
            self.boundaries.append(
                TurnBoundary(conversation.kind, answered, added.tokens, counted, found, added.short_form)
            )

    def _uncut(self, page: RenderedConversation, answered: int, end: int) -> None:
        """No place was found, perhaps because what would stand there is not rendered at all."""
        following = page.messages[answered + 1 : end]
        without = [*page.messages[: answered + 1], *following[1:]]
        if following and page.render(without, True) == page.asked(end):
            self.left_out.add(_name(following[0]))
        else:
            self.uncut.append(answered)

    def _look(self, page: RenderedConversation, answered: int, end: int) -> None:
        prompt, said, full = page.asked(answered), page.ended(answered + 1), page.asked(end)
        self.left_out.update(_left_out(page, said, full, answered, end))
        if self.unprompted is None and not said.startswith(prompt):
            shared = self._template.joint(prompt, said)
            self.unprompted = prompt[shared:][:_SHOWN], said[shared:][:_SHOWN]


def _left_out(page: RenderedConversation, said: str, full: str, answered: int, end: int) -> Iterator[str]:
    """What of an answer and of the messages around it is nowhere in the rendering, by a word of each."""
    answer = page.messages[answered]
    if not all(name in said for name in names_of(answer)):
        yield "tool calls"
    thought = thought_of(answer)
    if thought and thought not in said and answer.get("reasoning_content"):
        yield "reasoning_content"
    if not _shows(said, answer) and "</think>" not in str(answer.get("content")):
        yield "content beside tool calls" if has_calls(answer) else "answers"
    around = (*page.messages[:1], *page.messages[answered + 1 : end])
    for message in around:
        if not _shows(full, message):
            yield _name(message)


def _name(message: Fields) -> str:
    role = str(message.get("role"))
    return _NAMES.get(role, f"messages of the role {role}")


def _shows(text: str, message: Fields) -> bool:
    content = message.get("content")
    words = re.findall(r"[^\W_]+", content) if isinstance(content, str) else []
    return not words or max(words, key=len)[:20] in text

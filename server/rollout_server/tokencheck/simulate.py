"""Simulate a conversation: at each turn boundary, compare the reference tokens with the rendering and count of a trainer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from rollout_server.core.message import MalformedMessage
from rollout_server.edge.tokens.rendering_form import Arguments, Fields, has_calls
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.tokencheck.boundary import SimulatedConversation, TurnBoundary
from rollout_server.tokencheck.conversation import CheckConversation, reasoning_of, tool_names
from rollout_server.tokencheck.divergence import find_divergence
from rollout_server.tokencheck.model_output import Writing
from rollout_server.tokencheck.reference_tokens import ReferenceBuilder
from rollout_server.tokencheck.template import RenderedConversation, Template

_EXCERPT = 60
_NAMES = {"tool": "tool results", "system": "system messages", "user": "user messages"}


class Simulator:
    """Simulate conversations with one template. `natural`: the form in which arguments are spelled as models write them."""

    def __init__(self, template: Template, natural: Arguments) -> None:
        self._template, self._natural = template, natural

    def simulate(
        self, conversation: CheckConversation, forms: Sequence[Arguments], writings: Iterable[Writing]
    ) -> Iterator[SimulatedConversation]:
        """Yield the conversation as rendered by trainers, for each form of arguments and each way of writing.

        A way of writing is skipped if completions cannot be written that way, or would not differ.
        """
        normal = conversation.normal()
        own, usual = (
            _RenderedForms(self._template, conversation),
            _RenderedForms(self._template, normal or conversation),
        )
        for writing in writings:
            if (normal == conversation) if writing is Writing.SPELLING else (normal is None):
                continue
            renderings = own if writing is Writing.SPELLING else usual
            for form in forms:
                simulated = self._simulate(renderings, form, writing)
                if simulated is not None:
                    yield simulated

    def _simulate(self, renderings: _RenderedForms, form: Arguments, writing: Writing) -> SimulatedConversation | None:
        simulation = _Simulation(self._template, renderings, (self._natural, form), writing)
        refused = ""
        try:
            simulation.run()
        except RolloutFailed as failed:
            refused = failed.failure.message.partition("refuses the conversation: ")[2] or failed.failure.message
        except MalformedMessage as error:
            refused = str(error)
        if not simulation.applicable:
            return None
        return SimulatedConversation(
            kind=renderings.conversation.kind,
            form=form,
            writing=writing,
            boundaries=tuple(simulation.boundaries),
            refused=refused,
            uncut=tuple(simulation.uncut),
            left_out=frozenset(simulation.left_out),
            unprompted=simulation.unprompted,
        )


class _RenderedForms:
    """A conversation in each form of arguments, created on first use."""

    def __init__(self, template: Template, conversation: CheckConversation) -> None:
        self.conversation = conversation
        self._template = template
        self._made: dict[Arguments, RenderedConversation] = {}

    def of(self, form: Arguments) -> RenderedConversation:
        """Return the conversation in a form. Raises as `RenderedConversation` does."""
        if form not in self._made:
            self._made[form] = RenderedConversation(self._template, self.conversation, form)
        return self._made[form]


class _Simulation:
    """One conversation in one way of writing. `forms` is (natural, trainer's): the first gives the reference for the second."""

    def __init__(
        self, template: Template, renderings: _RenderedForms, forms: tuple[Arguments, Arguments], writing: Writing
    ) -> None:
        self._template, self._renderings, self._forms, self._writing = template, renderings, forms, writing
        self._conversation = renderings.conversation
        self.boundaries: list[TurnBoundary] = []
        self.uncut: list[int] = []
        self.left_out: set[str] = set()
        self.unprompted: tuple[str, str] | None = None
        self.applicable = True

    def run(self) -> None:
        """Run the simulation. Raises `RolloutFailed` if the template refuses; earlier results remain valid."""
        conversation = self._conversation
        natural, form = self._forms
        rendering, natural_rendering = self._renderings.of(form), self._renderings.of(natural)
        builder = ReferenceBuilder(self._template, conversation, natural_rendering, self._writing)
        for position in conversation.completions:
            end = conversation.end(position)
            if position + 1 == len(conversation.messages):
                break
            self._check_rendering(rendering, position, end)
            output, ids = builder.append_completion(position)
            if self._writing is Writing.SPELLING and not output.found:
                # This template's syntax for calls does not show the spelling of arguments, so there is nothing to vary.
                self.applicable = False
                return
            added = builder.append_environment(position, ids)
            if added is None:
                self._record_uncut(rendering, position, end)
                return
            counted = len(rendering.encoded_prompt(end).ids) - len(rendering.encoded_prompt(position).ids) - len(ids)
            found = find_divergence(self._template, conversation, rendering, builder.reference, end)
            self.boundaries.append(
                TurnBoundary(conversation.kind, position, added.tokens, counted, found, added.short_form)
            )

    def _record_uncut(self, rendering: RenderedConversation, position: int, end: int) -> None:
        """Record that no turn boundary was found, or that the template does not render the next message at all."""
        following = rendering.messages[position + 1 : end]
        without = [*rendering.messages[: position + 1], *following[1:]]
        if following and rendering.render(without, True) == rendering.prompt(end):
            self.left_out.add(_name(following[0]))
        else:
            self.uncut.append(position)

    def _check_rendering(self, rendering: RenderedConversation, position: int, end: int) -> None:
        prompt, history, full = rendering.prompt(position), rendering.history(position + 1), rendering.prompt(end)
        self.left_out.update(_omissions(rendering, history, full, position, end))
        if self.unprompted is None and not history.startswith(prompt):
            shared = self._template.common_length(prompt, history)
            self.unprompted = prompt[shared:][:_EXCERPT], history[shared:][:_EXCERPT]


def _omissions(rendering: RenderedConversation, history: str, full: str, position: int, end: int) -> Iterator[str]:
    """Yield the kinds of content of a completion and its neighbours that the rendering lacks; one word of each is searched for."""
    completion = rendering.messages[position]
    if not all(name in history for name in tool_names(completion)):
        yield "tool calls"
    reasoning = reasoning_of(completion)
    if reasoning and reasoning not in history and completion.get("reasoning_content"):
        yield "reasoning_content"
    if not _contains(history, completion) and "</think>" not in str(completion.get("content")):
        yield "content next to tool calls" if has_calls(completion) else "completions"
    around = (*rendering.messages[:1], *rendering.messages[position + 1 : end])
    for message in around:
        if not _contains(full, message):
            yield _name(message)


def _name(message: Fields) -> str:
    role = str(message.get("role"))
    return _NAMES.get(role, f"messages of the role {role}")


def _contains(text: str, message: Fields) -> bool:
    content = message.get("content")
    tokens = re.findall(r"[^\W_]+", content) if isinstance(content, str) else []
    return not tokens or max(tokens, key=len)[:20] in text

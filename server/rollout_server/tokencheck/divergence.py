"""Why a rendering does not begin with what was there, told from where the two part."""

from __future__ import annotations

import json

from rollout_server.core.ledger import Tokens
from rollout_server.core.segment import first_difference
from rollout_server.edge.tokens.encoding import common_prefix
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.tokencheck.boundary import Cause, Divergence
from rollout_server.tokencheck.conversation import CheckConversation, arguments_of, thought_of
from rollout_server.tokencheck.reference_tokens import ReferencePiece, ReferenceTokens, Region
from rollout_server.tokencheck.template import RenderedConversation, Template

_BEFORE, _BEHIND = 6, 14
"""Tokens that are shown around the first that differs."""
_ALIKE = 24
"""Characters, white space apart, that tell a changed space from another text."""


def parting(
    template: Template, conversation: CheckConversation, page: RenderedConversation, truth: ReferenceTokens, count: int
) -> Divergence | None:
    """How the prompt of `count` messages on `page` parts from the truth; None where it is the truth."""
    text = page.asked(count)
    ids = page.encoded(count).ids
    if ids == truth.ids:
        return None
    index = first_difference(truth.ids, ids)
    cause = Cause.RETOKENISED if text == truth.text else _DivergenceFinder(conversation, page, truth, text).cause()
    return Divergence(cause, index, _around(template, truth.ids, index), _around(template, ids, index))


def _around(template: Template, ids: Tokens, index: int) -> str:
    return template.loaded.decode(ids[max(0, index - _BEFORE) : index + _BEHIND])


class _DivergenceFinder:
    """Tells why `text`, a later prompt, is not the truth: from the first character that differs, and what stands there."""

    def __init__(
        self, conversation: CheckConversation, page: RenderedConversation, truth: ReferenceTokens, text: str
    ) -> None:
        self._conversation, self._page, self._truth, self._text = conversation, page, truth, text
        self._place = common_prefix(truth.text, text)

    def cause(self) -> Cause:
        piece = self._truth.at(self._place)
        if piece.region in (Region.ANSWER, Region.GENERATION_PROMPT) and self._thought_is_gone(piece):
            return Cause.THINKING
        match piece.region:
            case Region.ANSWER:
                return self._of_answer(piece)
            case Region.STOP:
                return Cause.SEPARATOR
            case Region.GENERATION_PROMPT:
                return Cause.PROMPT
            case Region.ENVIRONMENT if self._begins(piece):
                return Cause.SEPARATOR
        return Cause.TOOLS if self._depends_on_tools(piece) else Cause.HISTORY

    def _thought_is_gone(self, piece: ReferencePiece) -> bool:
        messages = self._conversation.messages
        thought = thought_of(messages[piece.answer]) if piece.answer < len(messages) else ""
        if piece.region is Region.ANSWER:  # some templates write an empty thought, and drop it later
            thought = thought or "</think>"
        return bool(thought) and self._text.count(thought) < self._truth.text.count(thought)

    def _of_answer(self, piece: ReferencePiece) -> Cause:
        given = arguments_of(self._conversation.messages[piece.answer])
        escaped = [
            json.dumps(arguments, ensure_ascii=ascii_only) for arguments in given for ascii_only in (False, True)
        ]
        if any(text in self._text and text not in self._truth.text for text in escaped):
            return Cause.TWICE
        if any(start <= self._place <= end for start, end in self._truth.arguments):
            return Cause.ARGUMENTS
        ours, theirs = ("".join(text[self._place :].split())[:_ALIKE] for text in (self._truth.text, self._text))
        return Cause.SPACE if ours == theirs else Cause.HISTORY

    def _begins(self, piece: ReferencePiece) -> bool:
        """Whether nothing but white space of the environment stands before the place."""
        return not self._truth.text[piece.start : self._place].strip()

    def _depends_on_tools(self, piece: ReferencePiece) -> bool:
        """Whether that prompt would still stand at the start of the later one if no tools were given."""
        if self._conversation.tools is None:
            return False
        last = max(piece.count for piece in self._truth.pieces)
        try:
            earlier, later = self._page.without_tools(piece.count), self._page.without_tools(last)
        except RolloutFailed:
            return False
        return later.startswith(earlier)

"""Classify why a rendering diverges from the reference tokens, from the first differing character."""

from __future__ import annotations

import json

from rollout_server.core.ledger import Tokens
from rollout_server.core.segment import first_difference
from rollout_server.edge.tokens.encoding import common_prefix
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.tokencheck.boundary import Cause, Divergence
from rollout_server.tokencheck.conversation import CheckConversation, arguments_of, reasoning_of
from rollout_server.tokencheck.reference_tokens import ReferenceSpan, ReferenceTokens, Region
from rollout_server.tokencheck.template import RenderedConversation, Template

_BEFORE, _BEHIND = 6, 14
"""Tokens before and after the first difference in excerpts."""
_ALIKE = 24
"""Number of non-space characters that must agree for a difference to count as changed white space."""


def find_divergence(
    template: Template,
    conversation: CheckConversation,
    rendering: RenderedConversation,
    reference: ReferenceTokens,
    count: int,
) -> Divergence | None:
    """Return how the prompt of `count` messages diverges from the reference; None if it does not."""
    text = rendering.prompt(count)
    ids = rendering.encoded_prompt(count).ids
    if ids == reference.ids:
        return None
    index = first_difference(reference.ids, ids)
    cause = (
        Cause.RETOKENISED
        if text == reference.text
        else _DivergenceFinder(conversation, rendering, reference, text).cause()
    )
    return Divergence(cause, index, _around(template, reference.ids, index), _around(template, ids, index))


def _around(template: Template, ids: Tokens, index: int) -> str:
    return template.loaded.decode(ids[max(0, index - _BEFORE) : index + _BEHIND])


class _DivergenceFinder:
    """Classify why `text`, a later prompt, diverges: from the first differing character and the region it has in the reference."""

    def __init__(
        self, conversation: CheckConversation, rendering: RenderedConversation, reference: ReferenceTokens, text: str
    ) -> None:
        self._conversation, self._rendering, self._reference, self._text = conversation, rendering, reference, text
        self._offset = common_prefix(reference.text, text)

    def cause(self) -> Cause:
        span = self._reference.at(self._offset)
        if span.region in (Region.COMPLETION, Region.GENERATION_PROMPT) and self._reasoning_is_dropped(span):
            return Cause.THINKING
        match span.region:
            case Region.COMPLETION:
                return self._completion_cause(span)
            case Region.STOP:
                return Cause.SEPARATOR
            case Region.GENERATION_PROMPT:
                return Cause.PROMPT
            case Region.ENVIRONMENT if self._begins(span):
                return Cause.SEPARATOR
        return Cause.TOOLS if self._depends_on_tools(span) else Cause.HISTORY

    def _reasoning_is_dropped(self, span: ReferenceSpan) -> bool:
        messages = self._conversation.messages
        reasoning = reasoning_of(messages[span.completion]) if span.completion < len(messages) else ""
        if span.region is Region.COMPLETION:  # Qwen3's template writes an empty <think></think>, and drops it later
            reasoning = reasoning or "</think>"
        return bool(reasoning) and self._text.count(reasoning) < self._reference.text.count(reasoning)

    def _completion_cause(self, span: ReferenceSpan) -> Cause:
        texts = arguments_of(self._conversation.messages[span.completion])
        escaped = [
            json.dumps(arguments, ensure_ascii=ascii_only) for arguments in texts for ascii_only in (False, True)
        ]
        if any(text in self._text and text not in self._reference.text for text in escaped):
            return Cause.TWICE
        if any(start <= self._offset <= end for start, end in self._reference.arguments):
            return Cause.ARGUMENTS
        expected, rendered = (
            "".join(text[self._offset :].split())[:_ALIKE] for text in (self._reference.text, self._text)
        )
        return Cause.SPACE if expected == rendered else Cause.HISTORY

    def _begins(self, span: ReferenceSpan) -> bool:
        """Return whether only white space of the environment precedes the difference."""
        return not self._reference.text[span.start : self._offset].strip()

    def _depends_on_tools(self, span: ReferenceSpan) -> bool:
        """Return whether the earlier prompt would still be a prefix of the later one if no tools were given."""
        if self._conversation.tools is None:
            return False
        last = max(span.count for span in self._reference.spans)
        try:
            earlier, later = self._rendering.without_tools(span.count), self._rendering.without_tools(last)
        except RolloutFailed:
            return False
        return later.startswith(earlier)

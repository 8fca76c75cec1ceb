"""Turns that were completed before a restart of the server, from which a new renderer learns how the trainer renders."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_server.core.ledger import Tokens, pack_tokens
from rollout_server.core.message import Message
from rollout_server.core.record import Answered, Asked
from rollout_server.edge.tokens.renderer import Renderer


class ResumedTurns:
    """The replayed turns of one conversation, oldest first.

    `masks`: whether the trainer gets response masks, whose lengths tell how it counts.
    """

    def __init__(self, turns: Sequence[tuple[Asked, Answered]] = (), *, masks: bool = False) -> None:
        self._turns = list(turns)
        self._masks = masks

    def add(self, asked: Asked, answered: Answered) -> None:
        """Add the next turn."""
        self._turns.append((asked, answered))

    @property
    def rendered_by(self) -> str:
        """Digest of the tokenizer and template that rendered the last turn; empty if none is known."""
        return self._turns[-1][1].rendered_by if self._turns else ""

    def fork(self) -> ResumedTurns:
        """Return the turns for a branch of the conversation. It may begin after an earlier turn; `teach` finds out."""
        return ResumedTurns(self._turns, masks=self._masks)

    async def teach(self, renderer: Renderer, messages: Sequence[Message]) -> None:
        """Show a new renderer what the trainer reported in these turns, and how it counted. Called once, before its first turn.

        The form in which a trainer renders and counts is not recorded, but it follows from the recorded prompts and masks. Raises
        what `Renderer.predict` raises.
        """
        last: Answered | None = None
        answered_at, tokens = 0, pack_tokens()
        for asked, answered in self._turns:
            if messages[asked.messages : asked.messages + 1] != (answered.message,):
                break  # a branch that begins before this turn
            if renderer.is_taught and not self._masks:
                break
            prompt = messages[: asked.messages]
            rendered = await renderer.predict(prompt, last, answered_at)
            if self._masks and last is not None and (rendered.mask_length or None) != answered.mask_length:
                counts = await renderer.counts(prompt, last, answered_at)
                form = next((form for form, count in counts.items() if (count or None) == answered.mask_length), None)
                if form is not None:
                    renderer.adopt(form)
            reported = _prompt(answered, tokens)
            if answered.reported is not None:
                await renderer.learn(rendered.predicted, reported)
            tokens = reported + (answered.token_ids or pack_tokens())
            last, answered_at = answered, asked.messages
        self._turns.clear()


def _prompt(answered: Answered, before: Tokens) -> Tokens:
    """Return the whole prompt of a turn; `before` are the tokens of the segment before it."""
    if answered.reported is not None:
        return before[: answered.shared] + answered.reported
    predicted = answered.predicted
    return before if predicted is None else before + predicted.closing + predicted.environment

"""The ledger digest that a gRPC trainer should hold after each turn.

The tokens, their authors and the effect of a new prompt belong to the ledger (`core.ledger`), which samplers only read. This
module adds what the ledger does not know: how the trainer computes its digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollout_server.core.checkpoint import Checkpoint, LedgerDigest
from rollout_server.core.ledger import Author, LedgerView, MaskReason, Prediction, Tokens, pack_tokens
from rollout_server.edge.wire.completion import NewSpan
from rollout_server.runtime.ports import CompletionRequest


@dataclass(frozen=True, slots=True)
class PromptDelta:
    """The prompt of one turn.

    Args:
        tokens: all token ids of the prompt.
        spans: the new spans; all of them if the prompt opens a segment.
        digest: the digest over the whole prompt.
        prompt: the checkpoint that the trainer should hold for it.
        opens: True if the prompt does not extend the ledger and opens a segment.
    """

    tokens: Tokens
    spans: tuple[NewSpan, ...]
    digest: LedgerDigest
    prompt: Checkpoint
    opens: bool = False

    def segment(self, request: CompletionRequest, ids: Tokens) -> list[NewSpan]:
        """Return all spans of the segment, including the completion `ids` of this prompt."""
        history = [] if self.opens else held_spans(request.ledger)
        return [*history, *self.spans, NewSpan(Author.MODEL, None, request.asked.turn, ids)]


class TrainerDigest:
    """The digest that the trainer of one conversation should hold.

    In message mode the trainer does not know who wrote which token. After a turn without token ids, the server cannot compute
    the trainer's digest: the ids of that completion are now somewhere in the prompt, at an unknown place. Then `unsure` is
    True: only token counts are compared, and the trainer's own digest is sent back as the base.
    """

    def __init__(self) -> None:
        self.unsure = False
        self.ever_unsure = False
        self.repeats: int | None = None
        self._theirs: Checkpoint | None = None
        self._digest = LedgerDigest()
        self._marks: dict[bytes, int] = {}

    def base(self, request: CompletionRequest) -> Checkpoint | None:
        """Return the checkpoint that the trainer holds before a turn; None before its first completion, and if it is unknown."""
        if request.ledger.gap or request.last is None:
            return None
        return self._theirs if self.unsure else self._digest.checkpoint(request.last_messages + 1)

    def predicted(self, request: CompletionRequest, predicted: Prediction) -> PromptDelta:
        """Return the prompt of a turn that this server rendered. It always extends the ledger."""
        return self._extended(request, predicted, request.ledger.prefix() + predicted.closing + predicted.environment)

    def reported(self, request: CompletionRequest, prompt: Tokens) -> PromptDelta:
        """Return the prompt of a turn as the trainer reports it."""
        ledger = request.ledger
        if ledger.extends(prompt):
            return self._extended(request, Prediction(pack_tokens(), prompt[ledger.tokens :]), prompt)
        self._theirs, self.unsure, self.ever_unsure = None, ledger.gap, self.ever_unsure or ledger.gap
        span = NewSpan(Author.OTHER, MaskReason.PROMPT, request.asked.turn, prompt)
        return _delta(request, prompt, (span,), LedgerDigest(), opens=True)

    def _extended(self, request: CompletionRequest, added: Prediction, prompt: Tokens) -> PromptDelta:
        turn, reason = request.asked.turn, MaskReason.PROMPT if request.last is None else MaskReason.ENVIRONMENT
        closing = NewSpan(Author.OTHER, MaskReason.CLOSING, turn, added.closing)
        rest = NewSpan(Author.OTHER, reason, turn, added.environment)
        return _delta(request, prompt, (closing, rest), self._digest.copy())

    def add(self, delta: PromptDelta, turn: int, ids: Tokens) -> Checkpoint:
        """Add a prompt and its completion. Returns the checkpoint that the trainer should then hold."""
        self._digest = delta.digest
        self._digest.add(ids, Author.MODEL)
        after = self._digest.checkpoint(delta.prompt.messages + 1)
        self._marks[after.digest] = turn
        return after

    def fork(self) -> TrainerDigest:
        """Return the digest of a branch that continues from the current tokens."""
        other = TrainerDigest()
        other.unsure, other.ever_unsure, other._theirs = self.unsure, self.ever_unsure, self._theirs
        other._digest, other._marks = self._digest.copy(), dict(self._marks)
        return other

    def fork_earlier(self) -> TrainerDigest:
        """Return the digest of a branch that begins after an earlier turn, before `rebuild`.

        What was unsure at any time may have been so in that turn.
        """
        other = TrainerDigest()
        other.unsure = other.ever_unsure = self.ever_unsure
        return other

    def rebuild(self, ledger: LedgerView) -> None:
        """Add the tokens of a ledger that this digest has not followed.

        In message mode the trainer may know them under another digest; it then asks for the whole history.
        """
        for span in held_spans(ledger):
            self._digest.add(span.ids, span.author)
            if span.author is Author.MODEL:
                self._marks[self._digest.checkpoint(0).digest] = span.turn

    def confirms(
        self, delta: PromptDelta, turn: int, ids: Tokens, checkpoint: Checkpoint | None, *, whole: bool
    ) -> bool:
        """Add a reported prompt and its completion. Returns whether the trainer's checkpoint is consistent with these tokens.

        `whole`: the trainer was sent the whole history. It may then hold earlier completions as prompt tokens, which changes
        its digest from there on.

        `repeats` is set to the earlier turn with the same prompt and completion, if there is one. Accepting it as a new turn
        would train the same tokens twice, so the result is then False.
        """
        earlier = dict(self._marks)
        expected = self.add(delta, turn, ids)
        self.repeats = earlier.get(expected.digest)
        if self.repeats is not None:
            return False
        if agree(expected, checkpoint):
            self._theirs, self.unsure = None, self.unsure and checkpoint is None
            return True
        if whole:
            # Accept a digest in which all tokens before this completion are prompt tokens.
            fresh = LedgerDigest()
            fresh.add(delta.tokens, Author.OTHER)
            fresh.add(ids, Author.MODEL)
            if agree(fresh.checkpoint(expected.messages), checkpoint):
                self._digest, self._theirs, self.unsure = fresh, None, False
                return True
        if checkpoint is not None:
            self._theirs = Checkpoint(expected.messages, checkpoint.tokens, checkpoint.digest)
        return self.unsure and checkpoint is not None and checkpoint.tokens == expected.tokens

    def first_mismatch(self, checkpoints: Sequence[Checkpoint]) -> int | None:
        """Return the first turn after which the trainer's checkpoints differ; None if it cannot be determined."""
        known = [self._marks[mark.digest] for mark in checkpoints if mark.digest in self._marks]
        later = [turn for turn in self._marks.values() if turn > max(known, default=0)]
        return min(later, default=None)


def held_spans(ledger: LedgerView) -> list[NewSpan]:
    """Return the spans of a ledger for a trainer that holds none of them. Author masks are omitted: trainers do not need them."""
    ids = ledger.prefix()
    return [
        NewSpan(
            span.author, None if span.author is Author.MODEL else span.reason, span.turn, ids[span.start : span.stop]
        )
        for span in ledger.authorship()
    ]


def agree(expected: Checkpoint, reported: Checkpoint | None) -> bool:
    """Return whether a trainer's checkpoint, if it sent one, covers the same tokens."""
    return reported is None or (reported.tokens, reported.digest) == (expected.tokens, expected.digest)


def first_other_token(spans: Sequence[NewSpan], tokens: Tokens, authors: Sequence[Author]) -> tuple[int, int] | None:
    """Return (index, turn) of the first token with another id or another author; None if all are equal."""
    index = 0
    for span in spans:
        for token in span.ids:
            if index >= len(tokens) or tokens[index] != token or authors[index] is not span.author:
                return index, span.turn
            index += 1
    return (index, spans[-1].turn) if spans and len(tokens) > index else None


def _delta(
    request: CompletionRequest, prompt: Tokens, spans: tuple[NewSpan, ...], digest: LedgerDigest, *, opens: bool = False
) -> PromptDelta:
    for span in spans:
        digest.add(span.ids, span.author)
    checkpoint = digest.checkpoint(request.asked.messages)
    return PromptDelta(prompt, tuple(span for span in spans if span.ids), digest, checkpoint, opens)

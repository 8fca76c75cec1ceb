"""The digest over what a gRPC trainer holds of a conversation, turn by turn.

Tokens, their authors and what a new prompt does to them are the rollout's ledger's alone (`core.ledger`), which samplers read. Kept
here is what the ledger does not know: how the trainer reckons its digest.
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
        tokens: all of them.
        spans: what is new in it: everything, where it opens a segment.
        digest: over all of it.
        prompt: the checkpoint that the trainer should have of it.
        opens: it does not extend what the ledger holds.
    """

    tokens: Tokens
    spans: tuple[NewSpan, ...]
    digest: LedgerDigest
    prompt: Checkpoint
    opens: bool = False

    def segment(self, request: CompletionRequest, ids: Tokens) -> list[NewSpan]:
        """The whole segment, with the completion of this prompt."""
        history = [] if self.opens else held_spans(request.ledger)
        return [*history, *self.spans, NewSpan(Author.MODEL, None, request.asked.turn, ids)]


class TrainerDigest:
    """The digest that the trainer of one conversation should have.

    A trainer that renders is not told who wrote what. Once a turn came without its tokens nobody here can reckon its digests,
    because the ids of that completion are part of a prompt now, and nothing says which: then this is `unsure`, compares numbers of
    tokens only, and hands the trainer's own digest back as the base.
    """

    def __init__(self) -> None:
        self.unsure = False
        self.repeats: int | None = None
        self._theirs: Checkpoint | None = None
        self._digest = LedgerDigest()
        self._marks: dict[bytes, int] = {}

    def base(self, request: CompletionRequest) -> Checkpoint | None:
        """What the trainer holds before a turn; None before its first completion, and where nobody here can tell."""
        if request.ledger.gap or request.last is None:
            return None
        return self._theirs if self.unsure else self._digest.checkpoint(request.last_messages + 1)

    def predicted(self, request: CompletionRequest, predicted: Prediction) -> PromptDelta:
        """The prompt of a turn that this side rendered. It extends the ledger."""
        return self._extended(request, predicted, request.ledger.prefix() + predicted.closing + predicted.environment)

    def reported(self, request: CompletionRequest, prompt: Tokens) -> PromptDelta:
        """The prompt of a turn as the trainer reports it."""
        ledger = request.ledger
        if ledger.extends(prompt):
            return self._extended(request, Prediction(pack_tokens(), prompt[ledger.tokens :]), prompt)
        self._theirs, self.unsure = None, ledger.gap
        span = NewSpan(Author.OTHER, MaskReason.PROMPT, request.asked.turn, prompt)
        return _delta(request, prompt, (span,), LedgerDigest(), opens=True)

    def _extended(self, request: CompletionRequest, added: Prediction, prompt: Tokens) -> PromptDelta:
        turn, reason = request.asked.turn, MaskReason.PROMPT if request.last is None else MaskReason.ENVIRONMENT
        closing = NewSpan(Author.OTHER, MaskReason.CLOSING, turn, added.closing)
        rest = NewSpan(Author.OTHER, reason, turn, added.environment)
        return _delta(request, prompt, (closing, rest), self._digest.copy())

    def add(self, delta: PromptDelta, turn: int, ids: Tokens) -> Checkpoint:
        """Takes a prompt and its completion in. Returns what the trainer should hold now."""
        self._digest = delta.digest
        self._digest.add(ids, Author.MODEL)
        after = self._digest.checkpoint(delta.prompt.messages + 1)
        self._marks[after.digest] = turn
        return after

    def fork(self) -> TrainerDigest:
        """That of a branch, which goes on from what is held now."""
        other = TrainerDigest()
        other.unsure, other._theirs = self.unsure, self._theirs
        other._digest, other._marks = self._digest.copy(), dict(self._marks)
        return other

    def confirms(self, delta: PromptDelta, turn: int, ids: Tokens, theirs: Checkpoint | None, *, whole: bool) -> bool:
        """Takes a reported prompt and its completion in. Returns whether the trainer's checkpoint can be that of the same tokens.

        With `whole` the trainer was sent the history as if it knew nothing of it. It may then hold earlier completions as tokens of
        anybody; that is its digest from there on. `repeats` is the turn whose prompt and completion came once more, if one did:
        to take them for another turn would train the same tokens twice.
        """
        earlier = dict(self._marks)
        ours = self.add(delta, turn, ids)
        self.repeats = earlier.get(ours.digest)
        if self.repeats is not None:
            return False
        if agree(ours, theirs):
            self._theirs, self.unsure = None, self.unsure and theirs is None
            return True
        if whole:
            anew = LedgerDigest()
            anew.add(delta.tokens, Author.OTHER)
            anew.add(ids, Author.MODEL)
            if agree(anew.checkpoint(ours.messages), theirs):
                self._digest, self._theirs, self.unsure = anew, None, False
                return True
        if theirs is not None:
            self._theirs = Checkpoint(ours.messages, theirs.tokens, theirs.digest)
        return self.unsure and theirs is not None and theirs.tokens == ours.tokens

    def first_mismatch(self, theirs: Sequence[Checkpoint]) -> int | None:
        """The turn from which on a trainer's checkpoints differ from these; None where they do not tell."""
        known = [self._marks[mark.digest] for mark in theirs if mark.digest in self._marks]
        later = [turn for turn in self._marks.values() if turn > max(known, default=0)]
        return min(later, default=None)


def held_spans(ledger: LedgerView) -> list[NewSpan]:
    """What a ledger holds, as a trainer is sent that holds nothing of it. Whom the author masks out is no trainer's concern."""
    ids = ledger.prefix()
    return [
        NewSpan(
            span.author, None if span.author is Author.MODEL else span.reason, span.turn, ids[span.start : span.stop]
        )
        for span in ledger.authorship()
    ]


def agree(ours: Checkpoint, theirs: Checkpoint | None) -> bool:
    """Whether a trainer's checkpoint, if it sent one, is of the same tokens."""
    return theirs is None or (theirs.tokens, theirs.digest) == (ours.tokens, ours.digest)


def first_other_token(spans: Sequence[NewSpan], theirs: Tokens, authors: Sequence[Author]) -> tuple[int, int] | None:
    """The first token that differs, or that another wrote, and the turn it belongs to. None where there is none."""
    index = 0
    for span in spans:
        for token in span.ids:
            if index >= len(theirs) or theirs[index] != token or authors[index] is not span.author:
                return index, span.turn
            index += 1
    return (index, spans[-1].turn) if spans and len(theirs) > index else None


def _delta(
    request: CompletionRequest, prompt: Tokens, spans: tuple[NewSpan, ...], digest: LedgerDigest, *, opens: bool = False
) -> PromptDelta:
    for span in spans:
        digest.add(span.ids, span.author)
    checkpoint = digest.checkpoint(request.asked.messages)
    return PromptDelta(prompt, tuple(span for span in spans if span.ids), digest, checkpoint, opens)

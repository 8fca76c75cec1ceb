"""What a gRPC trainer and this side both hold of a segment, and what a turn adds to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollout_server.core.checkpoint import Checkpoint, LedgerDigest
from rollout_server.core.ledger import Author, MaskReason, Origin, Prediction, SegmentKind, Tokens, pack_tokens
from rollout_server.core.segment import first_difference
from rollout_server.edge.wire.completion import NewSpan


@dataclass(frozen=True, slots=True)
class PromptDelta:
    """The prompt of one turn: what is new in it, and both sides' tokens with it."""

    predicted: Prediction
    spans: tuple[NewSpan, ...]
    digest: LedgerDigest
    prompt: Checkpoint


class TrainerLedger:
    """One segment, kept for one rollout. `messages` counts those that the trainer knows, its own answers among them.

    A trainer that renders is not told who wrote what. Once a turn came without its tokens nobody here can reckon its digests,
    because the ids of that answer are part of a prompt now, and nothing says which: such a book is `unsure`, compares numbers of
    tokens only, and hands the trainer's own digest back as the base.
    """

    def __init__(self, segment_id: str = "", origin: Origin | None = None) -> None:
        self.segment_id = segment_id
        self.origin = origin or Origin(SegmentKind.MAIN)
        self.messages = 0
        self.spans: list[NewSpan] = []
        self.unsure = False
        self.repeats: int | None = None
        self._begun = False
        self._gap = False
        self._theirs: Checkpoint | None = None
        self._digest = LedgerDigest()
        self._marks: dict[bytes, int] = {}

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self._digest.tokens

    @property
    def base(self) -> Checkpoint | None:
        """What the trainer holds; None before its first answer, and where nobody here can tell."""
        if self._gap or not self.messages:
            return None
        return self._theirs if self.unsure else self._digest.checkpoint(self.messages)

    def ids(self) -> Tokens:
        """All tokens."""
        ids = pack_tokens()
        for span in self.spans:
            ids.extend(span.ids)
        return ids

    def page(self, predicted: Prediction, turn: int, messages: int) -> PromptDelta:
        """The prompt of a turn that adds what was rendered."""
        first = not self.spans
        rest = NewSpan(
            Author.OTHER, MaskReason.PROMPT if first else MaskReason.ENVIRONMENT, turn, predicted.environment
        )
        spans = (NewSpan(Author.OTHER, MaskReason.CLOSING, turn, predicted.closing), rest)
        digest = self._digest.copy()
        for span in spans:
            digest.add(span.ids, span.author)
        return PromptDelta(predicted, tuple(span for span in spans if span.ids), digest, digest.checkpoint(messages))

    def answered(self, page: PromptDelta, turn: int, ids: Tokens) -> Checkpoint:
        """Takes the answer to a prompt in. Returns what the trainer should hold now."""
        self._begun = True
        self.spans += [*page.spans, NewSpan(Author.MODEL, None, turn, ids)]
        self._digest = page.digest
        self._digest.add(ids, Author.MODEL)
        self.messages = page.prompt.messages + 1
        after = self._digest.checkpoint(self.messages)
        self._marks[after.digest] = turn
        return after

    def prompt(self, page: PromptDelta) -> Tokens:
        """All tokens of a prompt."""
        ids = self.ids()
        for span in page.spans:
            ids.extend(span.ids)
        return ids

    def branch(self, origin: Origin) -> TrainerLedger:
        """The book of a segment that goes on from what this one holds now."""
        book = TrainerLedger("", origin)
        book.messages, book.spans, book.unsure = self.messages, list(self.spans), self.unsure
        book._gap, book._theirs = self._gap, self._theirs
        book._digest, book._marks = self._digest.copy(), dict(self._marks)
        return book

    def skip(self) -> None:
        """A turn came without its tokens. The next one that has them opens a segment."""
        self._gap = True

    def confirmed(self, page: PromptDelta, turn: int, ids: Tokens, theirs: Checkpoint | None, *, whole: bool) -> bool:
        """Takes the answer to a reported prompt in. Returns whether the trainer's checkpoint can be that of the same tokens.

        With `whole` the trainer was sent the history as if it knew nothing of it. It may then hold earlier answers as tokens of
        anybody; that is its digest from there on. `repeats` is the turn whose prompt and answer came once more, if one did:
        to take them for another turn would train the same tokens twice.
        """
        prompt = self.prompt(page) if whole else None
        earlier = dict(self._marks)
        ours = self.answered(page, turn, ids)
        self.repeats = earlier.get(ours.digest)
        if self.repeats is not None:
            return False
        if agree(ours, theirs):
            self._theirs, self.unsure = None, self.unsure and theirs is None
            return True
        if prompt is not None:
            anew = LedgerDigest()
            anew.add(prompt, Author.OTHER)
            anew.add(ids, Author.MODEL)
            if agree(anew.checkpoint(self.messages), theirs):
                self._digest, self._theirs, self.unsure = anew, None, False
                return True
        if theirs is not None:
            self._theirs = Checkpoint(self.messages, theirs.tokens, theirs.digest)
        return self.unsure and theirs is not None and theirs.tokens == ours.tokens

    def first_parted(self, theirs: Sequence[Checkpoint]) -> int | None:
        """The turn in which a trainer's checkpoints part from this book; None where they do not tell."""
        known = [self._marks[mark.digest] for mark in theirs if mark.digest in self._marks]
        later = [turn for turn in self._marks.values() if turn > max(known, default=0)]
        return min(later, default=None)

    def reported(self, prompt: Tokens, turn: int, messages: int) -> tuple[TrainerLedger, PromptDelta]:
        """The prompt of a turn as the trainer reports it, in this book or, if it does not extend it, in a new one."""
        held = self.ids()
        if self._gap or prompt[: len(held)] != held:
            return self._opened(held, prompt, turn, messages)
        return self, self.page(Prediction(pack_tokens(), prompt[len(held) :]), turn, messages)

    def _opened(self, held: Tokens, prompt: Tokens, turn: int, messages: int) -> tuple[TrainerLedger, PromptDelta]:
        """The book of a segment that begins with this prompt."""
        kind = SegmentKind.GAP if self._gap else SegmentKind.DRIFT
        shared = first_difference(held, prompt)
        # Where no answer of the segment came with its tokens so far, it only begins with another prompt.
        first = replace(self.origin, parent_tokens=shared)
        book = (
            TrainerLedger("", Origin(kind, self.segment_id, shared))
            if self._begun
            else TrainerLedger(self.segment_id, first)
        )
        book.unsure, book._marks = self._gap, dict(self._marks)
        return book, book.page(Prediction(pack_tokens(), prompt), turn, messages)


def agree(ours: Checkpoint, theirs: Checkpoint | None) -> bool:
    """Whether a trainer's checkpoint, if it sent one, is of the same tokens."""
    return theirs is None or (theirs.tokens, theirs.digest) == (ours.tokens, ours.digest)


def parted(book: Sequence[NewSpan], theirs: Tokens, authors: Sequence[Author]) -> tuple[int, int] | None:
    """The first token that differs, or that another wrote, and the turn it belongs to. None where there is none."""
    place = 0
    for span in book:
        for token in span.ids:
            if place >= len(theirs) or theirs[place] != token or authors[place] is not span.author:
                return place, span.turn
            place += 1
    return (place, book[-1].turn) if book and len(theirs) > place else None

"""What a gRPC trainer and this side both hold of a segment, and what a turn adds to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollout_server.core.checkpoint import Checkpoint, LedgerDigest
from rollout_server.core.ledger import Author, MaskReason, Origin, Prediction, SegmentKind, Tokens, pack_tokens
from rollout_server.core.prefix import first_difference
from rollout_server.edge.rpc.wire.completion import NewSpan


@dataclass(frozen=True, slots=True)
class Page:
    """The prompt of one turn: what is new in it, and both sides' tokens with it."""

    predicted: Prediction
    spans: tuple[NewSpan, ...]
    digest: LedgerDigest
    prompt: Checkpoint


class Book:
    """One segment, kept for one rollout. `messages` counts those that the trainer knows, its own answers among them."""

    def __init__(self, segment_id: str = "", origin: Origin | None = None) -> None:
        self.segment_id = segment_id
        self.origin = origin or Origin(SegmentKind.MAIN)
        self.messages = 0
        self.spans: list[NewSpan] = []
        self._digest = LedgerDigest()
        self._marks: dict[bytes, int] = {}

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self._digest.tokens

    @property
    def base(self) -> Checkpoint | None:
        """What the trainer holds; None before its first answer."""
        return self._digest.checkpoint(self.messages) if self.messages else None

    def ids(self) -> Tokens:
        """All tokens."""
        ids = pack_tokens()
        for span in self.spans:
            ids.extend(span.ids)
        return ids

    def page(self, predicted: Prediction, turn: int, messages: int) -> Page:
        """The prompt of a turn that adds what was rendered."""
        first = not self.spans
        rest = NewSpan(
            Author.OTHER, MaskReason.PROMPT if first else MaskReason.ENVIRONMENT, turn, predicted.environment
        )
        spans = (NewSpan(Author.OTHER, MaskReason.CLOSING, turn, predicted.closing), rest)
        digest = self._digest.copy()
        for span in spans:
            digest.add(span.ids, span.author)
        return Page(predicted, tuple(span for span in spans if span.ids), digest, digest.checkpoint(messages))

    def answered(self, page: Page, turn: int, ids: Tokens) -> Checkpoint:
        """Takes the answer to a prompt in. Returns what the trainer should hold now."""
        self.spans += [*page.spans, NewSpan(Author.MODEL, None, turn, ids)]
        self._digest = page.digest
        self._digest.add(ids, Author.MODEL)
        self.messages = page.prompt.messages + 1
        after = self._digest.checkpoint(self.messages)
        self._marks[after.digest] = turn
        return after

    def first_parted(self, theirs: Sequence[Checkpoint]) -> int | None:
        """The turn in which a trainer's checkpoints part from this book; None where they do not tell."""
        known = [self._marks[mark.digest] for mark in theirs if mark.digest in self._marks]
        later = [turn for turn in self._marks.values() if turn > max(known, default=0)]
        return min(later, default=None)

    def reported(self, prompt: Tokens, turn: int, messages: int) -> tuple[Book, Page]:
        """The prompt of a turn as the trainer reports it, in this book or, if it does not extend it, in a new one."""
        held = self.ids()
        extends = prompt[: len(held)] == held
        book = self if extends else Book("", self._drifted(held, prompt))
        new = prompt[len(held) :] if extends else prompt
        return book, book.page(Prediction(pack_tokens(), new), turn, messages)

    def _drifted(self, held: Tokens, prompt: Tokens) -> Origin:
        return Origin(SegmentKind.DRIFT, self.segment_id, first_difference(held, prompt))


def parted(book: Sequence[NewSpan], theirs: Tokens, authors: Sequence[Author]) -> tuple[int, int] | None:
    """The first token that differs, or that another wrote, and the turn it belongs to. None where there is none."""
    place = 0
    for span in book:
        for token in span.ids:
            if place >= len(theirs) or theirs[place] != token or authors[place] is not span.author:
                return place, span.turn
            place += 1
    return (place, book[-1].turn) if book and len(theirs) > place else None

"""A segment of the ledger: a stretch in which every prompt extends the last, and one training sample."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeAlias, TypeVar

Tokens: TypeAlias = "array[int]"
"""Token ids, each below 2^31, in an array of unsigned 32-bit integers."""

Logprobs: TypeAlias = "array[float]"
"""Natural logarithms of probabilities, in an array of 32-bit floats."""

MAX_TOKEN_ID = 2**31 - 1

_Sequence = TypeVar("_Sequence", "array[int]", str)


def pack_tokens(ids: Iterable[int] = ()) -> Tokens:
    """Packs token ids. Raises OverflowError for ids outside 32 bits."""
    return array("I", ids)


def pack_logprobs(values: Iterable[float] = ()) -> Logprobs:
    """Packs logprobs."""
    return array("f", values)


def _zeros(count: int) -> Logprobs:
    return array("f", bytes(4 * count))


class Author(Enum):
    """Who wrote a token."""

    MODEL = "model"
    OTHER = "other"


class MaskReason(Enum):
    """Why a span does not train."""

    PROMPT = "prompt"
    ENVIRONMENT = "environment"
    CLOSING = "closing"
    AUTHOR = "author"


class SegmentKind(Enum):
    """How a segment came to be."""

    MAIN = "main"
    DRIFT = "drift"
    COMPACTION = "compaction"
    SUBAGENT = "subagent"
    BRANCH = "branch"
    GAP = "gap"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a segment comes from: the segment it follows and how many tokens at its start it shares with it."""

    kind: SegmentKind
    parent_id: str = ""
    parent_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Plane:
    """Values that travel beside tokens, such as expert routing: the same number of bytes for each, which nobody here reads.

    `dtype` is the element type in NumPy's words.
    """

    name: str
    dtype: str
    values: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Span:
    """A run of tokens with one author: `start` and `stop` count from the start of the segment, `turn` from 1."""

    author: Author
    reason: MaskReason | None
    turn: int
    start: int
    stop: int
    policy_version: str = ""
    logprobs_known: bool = False
    planes: tuple[Plane, ...] = ()

    @property
    def trains(self) -> bool:
        """The model wrote it and nobody masked it out."""
        return self.author is Author.MODEL and self.reason is None


@dataclass(frozen=True, slots=True)
class Sample:
    """A segment as trainers use it. Mask (one byte a token, 0 or 1) and logprobs are as long as `response_ids`.

    `logprobs` is None where at least one answer came without them.
    """

    segment_id: str
    prompt_ids: Tokens
    response_ids: Tokens
    response_mask: bytes
    logprobs: Logprobs | None


class Segment:
    """A stretch of ledger in which every prompt extends the last. Append-only.

    `inherited` are the spans of which the prompt of a branch consists: who wrote its tokens where they were sampled.
    """

    def __init__(self, segment_id: str, origin: Origin, inherited: Sequence[Span] = ()) -> None:
        self.id = segment_id
        self.origin = origin
        self.inherited = tuple(inherited)
        self.verified = True
        self._ids: Tokens = pack_tokens()
        self._logprobs: Logprobs = pack_logprobs()
        self._spans: list[Span] = []
        self._settled = 0

    def __len__(self) -> int:
        """Tokens so far, those that no answer followed yet included."""
        return len(self._ids)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans up to the last one of the model: tool results that no turn saw are not part of a trajectory."""
        return tuple(self._spans[: self._settled])

    def authorship(self, stop: int) -> tuple[Span, ...]:
        """The spans of the first `stop` tokens, with the prompt of a branch as it was written, not as it is masked."""
        spans = (*self.inherited, *self._spans[1:]) if self.inherited else self._spans
        return tuple(span for span in spans if span.stop <= stop)

    def ids(self, start: int = 0, stop: int | None = None) -> Tokens:
        """A copy of the tokens from `start` to before `stop`, those that no answer followed yet included."""
        return self._ids[start:stop]

    def logprobs(self, start: int = 0, stop: int | None = None) -> Logprobs:
        """A copy of the logprobs; 0.0 where the model did not write the token or where they are unknown."""
        return self._logprobs[start:stop]

    def sample(self) -> Sample:
        """The training sample: prompt, response, mask and logprobs."""
        spans = self.spans
        cut = spans[0].stop if spans else 0
        end = spans[-1].stop if spans else 0
        mask = b"".join((b"\x01" if s.trains else b"\x00") * (s.stop - s.start) for s in spans[1:])
        known = all(s.logprobs_known for s in spans if s.author is Author.MODEL)
        values = self._trained_logprobs(spans[1:], cut, end) if known else None
        return Sample(self.id, self._ids[:cut], self._ids[cut:end], mask, values)

    def _trained_logprobs(self, spans: Iterable[Span], cut: int, end: int) -> Logprobs:
        values = self._logprobs[cut:end]
        for span in spans:
            if not span.trains:
                values[span.start - cut : span.stop - cut] = _zeros(span.stop - span.start)
        return values

    def author_at(self, index: int) -> Author:
        """Who wrote the token at `index`."""
        return next(s.author for s in self._spans if s.start <= index < s.stop)

    def append_masked(self, ids: Tokens, reason: MaskReason, turn: int) -> None:
        """Adds tokens that the model did not write."""
        if reason is MaskReason.PROMPT and not self._spans:
            self._settled = 1
            self._add(ids, Span(Author.OTHER, reason, turn, 0, len(ids)), None)
        elif ids:
            start = len(self._ids)
            self._add(ids, Span(Author.OTHER, reason, turn, start, start + len(ids)), None)

    def append_generated(self, ids: Tokens, logprobs: Logprobs | None, span: Span) -> None:
        """Adds what the model wrote. `span` says of it what is known beside its tokens and its place, which is set here."""
        if not ids:
            return
        start = len(self._ids)
        known = logprobs is not None
        self._add(ids, replace(span, start=start, stop=start + len(ids), logprobs_known=known), logprobs)
        self._settled = len(self._spans)

    def mask_turn(self, turn: int) -> None:
        """Takes what the model wrote in a turn out of the training: an author requests it, and nothing undoes it."""
        self._spans = [
            replace(span, reason=MaskReason.AUTHOR) if span.author is Author.MODEL and span.turn == turn else span
            for span in self._spans
        ]

    def _add(self, ids: Tokens, span: Span, values: Logprobs | None) -> None:
        self._ids.extend(ids)
        self._logprobs.extend(_zeros(len(ids)) if values is None else values)
        self._spans.append(span)


def first_difference(a: _Sequence, b: _Sequence) -> int:
    """The first index at which `a` and `b` differ; the shorter length where one is a prefix of the other."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # a[:low] == b[:low] always holds
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

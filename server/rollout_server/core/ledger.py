"""The ledger: every token of a rollout, and who wrote it.

Theory. A model is shown a prompt and writes an answer; the next prompt is the last one, the answer, and what the world said
since. So the tokens of a rollout form one growing sequence, cut into spans: the first prompt, then answer, environment,
answer, environment and so on. A token trains exactly if the model wrote it, which makes the mask a consequence of
authorship; it is never stored, so it cannot disagree.

All of this holds while each prompt extends the sequence. Trainers that render the conversation anew each turn sometimes
show the model something else: the template dropped earlier thinking, or the text of an answer was tokenised in another
way. This is drift. What the model saw then is a prompt like any other, so a new segment opens whose prompt is exactly what
the trainer reports, all of it masked: tokens that were sampled once are not trained a second time, and nothing is patched
or aligned. A segment is one training sample (D4).

Where a trainer reports its prompts, they are the truth for prompt and environment tokens, and the rendering on our side
only predicts them. If the prompt extends the segment but differs from the prediction, the segment goes on with the
trainer's tokens, and the difference is reported as drift too.

A trainer may also send no ids for a turn. What it saw and wrote then is unknown, and the next prompt holds an answer that
nobody can tell from its surroundings; so a gap opens a segment as well, whose prompt is masked as a whole.

An agent may hold several conversations. Each has its line: the segment that its next turn continues. A branch goes on from the
tokens that another line held when it was made; in the segment that it opens they are prompt, since they train where they were
sampled.

Laws (tests/core/test_ledger.py): authorship decides the mask; spans concatenated are what the model saw and wrote; ids, mask and
logprobs have equal length, with 0.0 for tokens the model did not write and nothing at all where the trainer sent no
logprobs; spans are only added, and an author can do no more than take one of the model's out; a segment, as it is handed out,
ends with a token of the model as soon as there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from rollout_server.core.segment import (
    MAX_TOKEN_ID,
    Author,
    Logprobs,
    MaskReason,
    Origin,
    Plane,
    Segment,
    SegmentKind,
    Span,
    Tokens,
    first_difference,
    pack_logprobs,
    pack_tokens,
)

__all__ = [
    "MAX_TOKEN_ID",
    "Author",
    "ConversationLedger",
    "Drift",
    "DriftKind",
    "Ledger",
    "LedgerView",
    "Logprobs",
    "MaskReason",
    "Origin",
    "Prediction",
    "Segment",
    "SegmentKind",
    "Span",
    "Tokens",
    "Turn",
    "pack_logprobs",
    "pack_tokens",
]


class DriftKind(Enum):
    """What parted between the prompt a trainer reports and ledger + what was appended."""

    HISTORY_REWRITTEN = "history_rewritten"
    RETOKENISED = "retokenised"
    ENVIRONMENT = "environment"
    TRUNCATED = "truncated"
    PROMPT = "prompt"


@dataclass(frozen=True, slots=True)
class Drift:
    """The prompt that a trainer reported is not ledger + what was appended.

    `index` is the first token that differs, counted from the start of the prompt; the lengths are in tokens.
    """

    kind: DriftKind
    index: int
    expected: int
    reported: int

    @property
    def opens_segment(self) -> bool:
        """The prompt does not extend the segment."""
        return self.kind not in (DriftKind.ENVIRONMENT, DriftKind.PROMPT)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What our rendering expects to stand between ledger and answer: an end token that the last answer lacks, then the rest."""

    closing: Tokens
    environment: Tokens


@dataclass(frozen=True, slots=True)
class Turn:
    """The tokens of one turn. At least one of `predicted` and `reported` is needed.

    Args:
        number: the turn, from 1.
        answer: what the model wrote.
        logprobs: as long as `answer`, or None where the trainer sent none.
        predicted: what our rendering expects before the answer; None without a tokenizer.
        reported: the prompt as the trainer reports it, without its first `shared` tokens; None where it does not.
        policy_version: the policy that wrote the answer.
        planes: what came beside its tokens.
        shared: tokens at the start of the reported prompt that are known to be the first ones that the line holds.
    """

    number: int
    answer: Tokens
    logprobs: Logprobs | None = None
    predicted: Prediction | None = None
    reported: Tokens | None = None
    policy_version: str = ""
    planes: tuple[Plane, ...] = ()
    shared: int = 0


class LedgerView(Protocol):
    """The ledger of one conversation, for reading: what samplers are given of it."""

    @property
    def gap(self) -> bool:
        """The tokens of a turn are missing, so that nothing can extend the segment."""

    @property
    def origin(self) -> Origin:
        """Of the segment that the next turn continues; of the first one, as far as it is known, before its first prompt."""

    @property
    def tokens(self) -> int:
        """How many the next prompt is to begin with."""

    def prefix(self) -> Tokens:
        """A copy of the tokens that the next prompt is to begin with."""

    def authorship(self) -> Sequence[Span]:
        """The spans of the held tokens, in a branch with those of the segments that it goes on from."""

    def extends(self, prompt: Tokens) -> bool:
        """Whether a whole prompt extends what is held. Otherwise its turn opens a segment."""


class ConversationLedger:
    """The ledger of one conversation. `id` names the segment that its next turn continues, also before that is opened.

    Args:
        ledger: where segments go.
        segment_id: of its first segment.
        origin: of its first segment, which the first prompt settles.
        stem: the segment whose first `origin.parent_tokens` tokens it goes on from; None: it begins with nothing.
        gap: the tokens of at least one turn are missing since the last commit, so that nothing can extend the segment.
    """

    def __init__(
        self, ledger: Ledger, segment_id: str, origin: Origin, stem: Segment | None = None, *, gap: bool = False
    ) -> None:
        self.id = segment_id
        self.segment: Segment | None = None
        self.gap = gap
        self._ledger = ledger
        self._origin = origin
        self._stem = stem

    @property
    def origin(self) -> Origin:
        """Of the segment that the next turn continues."""
        return self._origin if self.segment is None else self.segment.origin

    @property
    def tokens(self) -> int:
        """How many the next prompt is to begin with."""
        return len(self.segment) if self.segment is not None else self._origin.parent_tokens

    def prefix(self) -> Tokens:
        """What the next prompt is to begin with."""
        holder = self.segment or self._stem
        return holder.ids(0, self.tokens) if holder is not None else pack_tokens()

    def authorship(self) -> Sequence[Span]:
        """The spans of what is held, by who wrote them."""
        holder = self.segment or self._stem
        return holder.authorship(self.tokens) if holder is not None else ()

    def extends(self, prompt: Tokens) -> bool:
        """Whether a whole prompt extends what is held. Otherwise its turn opens a segment."""
        return not self.gap and prompt[: self.tokens] == self.prefix()

    def branch_origin(self) -> Origin:
        """Where a line comes from that goes on from what this one holds."""
        holder = self.segment or self._stem
        return Origin(SegmentKind.BRANCH, self.id if holder is None else holder.id, self.tokens)

    def branch(self) -> ConversationLedger:
        """A line that goes on from what this one holds."""
        origin = self.branch_origin()
        return ConversationLedger(
            self._ledger, self._ledger.reserve(), origin, self.segment or self._stem, gap=self.gap
        )

    def commit(self, turn: Turn) -> Drift | None:
        """Adds one turn: what stood before the answer, then the answer. Returns the drift that was found.

        Raises ValueError for a turn without any prompt, for one without a reported prompt after a gap, and for wrong lengths.
        """
        if turn.logprobs is not None and len(turn.logprobs) != len(turn.answer):
            raise ValueError("as many logprobs as tokens are needed")
        if not 0 <= turn.shared <= self.tokens:
            raise ValueError("a prompt cannot share more tokens than are held")
        segment, drift = self._add_prompt(turn)
        self.gap = False
        segment.verified = segment.verified and turn.reported is not None
        written = Span(Author.MODEL, None, turn.number, 0, 0, turn.policy_version, planes=turn.planes)
        segment.append_generated(turn.answer, turn.logprobs, written)
        return drift

    def _add_prompt(self, turn: Turn) -> tuple[Segment, Drift | None]:
        segment = self.segment
        if segment is not None and turn.reported is not None and turn.shared == len(segment) and not self.gap:
            return segment, _extend(segment, turn, turn.reported)
        turn = self._in_full(turn)
        if self.gap:
            return self._open_after_gap(segment, turn), None
        if segment is None:
            return self._begin(turn)
        if turn.reported is None:
            _add_environment(segment, _need(turn.predicted), turn.number)
            return segment, None
        length = len(segment)
        if self.extends(turn.reported):
            return segment, _extend(segment, turn, turn.reported[length:])
        drift = _divergence(segment, length, turn)
        return self._open(Origin(SegmentKind.DRIFT, segment.id, drift.index), turn.reported, turn.number), drift

    def _in_full(self, turn: Turn) -> Turn:
        """The same turn with all tokens of its reported prompt."""
        if turn.reported is None or not turn.shared:
            return turn
        return replace(turn, reported=self.prefix()[: turn.shared] + turn.reported, shared=0)

    def _begin(self, turn: Turn) -> tuple[Segment, Drift | None]:
        """Opens the first segment, with what was held before it as part of its prompt."""
        prefix, prompt, drift = self.prefix(), turn.reported, None
        if prompt is None:
            predicted = _need(turn.predicted)
            prompt = prefix + predicted.closing + predicted.environment
            return self._open(self._origin, prompt, turn.number, self._inherited(turn, prompt)), None
        expected = (
            prefix + turn.predicted.closing + turn.predicted.environment if turn.predicted is not None else prompt
        )
        shared = first_difference(prefix, prompt)
        if self._stem is not None and shared < len(prefix):
            drift = _divergence(self._stem, len(prefix), turn)
        elif expected != prompt:
            kind = DriftKind.ENVIRONMENT if prefix else DriftKind.PROMPT
            drift = Drift(kind, first_difference(expected, prompt), len(expected), len(prompt))
        origin = replace(self._origin, parent_tokens=shared)
        return self._open(origin, prompt, turn.number, self._inherited(turn, prompt)), drift

    def _inherited(self, turn: Turn, prompt: Tokens) -> Sequence[Span]:
        """The spans of a branch's first prompt: those that the stem had, and what was added. None where it does not extend them."""
        if self._stem is None or not self.extends(prompt):
            return ()
        held = self.tokens
        closing = turn.predicted.closing if turn.predicted is not None else pack_tokens()
        cut = held + len(closing) if prompt[held : held + len(closing)] == closing else held
        added = (MaskReason.CLOSING, held, cut), (MaskReason.ENVIRONMENT, cut, len(prompt))
        spans = [Span(Author.OTHER, reason, turn.number, start, stop) for reason, start, stop in added if start < stop]
        return (*self.authorship(), *spans)

    def _open_after_gap(self, segment: Segment | None, turn: Turn) -> Segment:
        """Opens a segment with the whole prompt. A prediction starts where the unknown turn ended, so it predicts nothing here."""
        if turn.reported is None:
            raise ValueError("after a gap a reported prompt is needed")
        shared = first_difference(self.prefix(), turn.reported)
        origin = replace(self._origin, parent_tokens=shared)
        if segment is not None:
            origin = Origin(SegmentKind.GAP, segment.id, shared)
        return self._open(origin, turn.reported, turn.number)

    def _open(self, origin: Origin, prompt: Tokens, turn: int, inherited: Sequence[Span] = ()) -> Segment:
        self.id = self.id if self.segment is None else self._ledger.reserve()
        self.segment = Segment(self.id, origin, inherited)
        self.segment.append_masked(prompt, MaskReason.PROMPT, turn)
        self._ledger.add(self.segment)
        return self.segment


class Ledger:
    """The segments of a rollout, nearly always one."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._reserved = 0
        self.main = self.open(Origin(SegmentKind.MAIN))

    @property
    def segments(self) -> tuple[Segment, ...]:
        """In the order in which they were opened."""
        return tuple(self._segments)

    def open(self, origin: Origin) -> ConversationLedger:
        """A line that begins with nothing."""
        return ConversationLedger(self, self.reserve(), origin)

    @property
    def next_id(self) -> str:
        """The id that is given out next."""
        return str(self._reserved)

    def reserve(self) -> str:
        """An id that no other segment has. It stays unused where no turn comes."""
        segment_id, self._reserved = self.next_id, self._reserved + 1
        return segment_id

    def add(self, segment: Segment) -> None:
        """A segment was opened."""
        self._segments.append(segment)


def _extend(segment: Segment, turn: Turn, environment: Tokens) -> Drift | None:
    """Adds what a prompt that extends the segment holds beyond it."""
    predicted = turn.predicted
    expected = predicted.closing + predicted.environment if predicted is not None else environment
    if predicted is not None and environment == expected:
        _add_environment(segment, predicted, turn.number)
        return None
    length = len(segment)
    segment.append_masked(environment, MaskReason.ENVIRONMENT, turn.number)
    if environment == expected:
        return None
    index = length + first_difference(expected, environment)
    return Drift(DriftKind.ENVIRONMENT, index, length + len(expected), length + len(environment))


def _add_environment(segment: Segment, predicted: Prediction, turn: int) -> None:
    segment.append_masked(predicted.closing, MaskReason.CLOSING, turn)
    segment.append_masked(predicted.environment, MaskReason.ENVIRONMENT, turn)


def _divergence(segment: Segment, length: int, turn: Turn) -> Drift:
    """The drift between the first `length` tokens of a segment and the prompt."""
    reported = turn.reported if turn.reported is not None else pack_tokens()
    index = first_difference(segment.ids(0, length), reported)
    if index == len(reported):
        kind = DriftKind.TRUNCATED
    elif segment.author_at(index) is Author.MODEL:
        kind = DriftKind.RETOKENISED
    else:
        kind = DriftKind.HISTORY_REWRITTEN
    added = len(turn.predicted.closing) + len(turn.predicted.environment) if turn.predicted is not None else 0
    return Drift(kind, index, length + added, len(reported))


def _need(predicted: Prediction | None) -> Prediction:
    if predicted is None:
        raise ValueError("a turn needs a predicted or a reported prompt")
    return predicted

"""The ledger: every token of a rollout, and who wrote it.

Theory. The model sees a prompt and generates a completion. The next prompt consists of the last prompt, the completion, and what
the environment added since. So the tokens of a rollout form one growing sequence of spans: the first prompt, then completion,
environment, completion, environment and so on. A token is trained if and only if the model generated it. The mask therefore
follows from authorship. It is computed and never stored, so the two cannot disagree.

This holds while each prompt extends the sequence. A trainer that renders the conversation anew in each turn may show the model
other tokens: the template dropped earlier thinking, or the text of a completion was tokenized in another way. This is drift. A new
segment then opens, and its prompt is exactly the prompt that the trainer reported, all of it masked. So no sampled token is
trained a second time, and nothing is patched or aligned. A segment is one training sample (D4).

Where a trainer reports its prompts, they take precedence for prompt and environment tokens, and the server's rendering is only a
prediction. If the prompt extends the segment but differs from the prediction, the segment continues with the trainer's tokens, and
the difference is also recorded as drift.

A trainer may send no ids for a turn. The tokens of that turn are then unknown, and the next prompt contains a completion whose
boundaries cannot be found. Such a gap also opens a segment, whose whole prompt is masked.

An agent may have several conversations. Each has its own `ConversationLedger`, which holds the segment that the next turn
continues. A branch starts with the tokens that its parent holds at that time, or held after an earlier turn (`BranchPoint`). In the
branch's segment they are prompt, because they are trained in the parent's.

Laws (docs/design.md; tested in tests/core/test_ledger.py):

* The author of a token decides its mask.
* The spans, concatenated, are exactly what the model saw and generated.
* Ids, mask and logprobs have equal length. A logprob is 0.0 for tokens that the model did not generate; a sample has none at all
  where the trainer sent none.
* Spans are only appended. An author of agents can only mask generated tokens out.
* A segment, as it is handed out, ends with a generated token if it has any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from rollout_server.core.segment import (
    AGENT,
    MAX_TOKEN_ID,
    Author,
    Logprobs,
    MaskReason,
    Origin,
    Parting,
    Plane,
    PolicyRun,
    Role,
    Segment,
    SegmentKind,
    Span,
    Tokens,
    first_difference,
    pack_logprobs,
    pack_tokens,
)

__all__ = [
    "AGENT",
    "MAX_TOKEN_ID",
    "Author",
    "BranchPoint",
    "ConversationLedger",
    "Drift",
    "DriftKind",
    "Ledger",
    "LedgerView",
    "Logprobs",
    "MaskReason",
    "Origin",
    "Parting",
    "PolicyRun",
    "Prediction",
    "Role",
    "Segment",
    "SegmentKind",
    "Span",
    "Tokens",
    "Turn",
    "pack_logprobs",
    "pack_tokens",
]


class DriftKind(Enum):
    """How the prompt that a trainer reported differs from the ledger's prediction.

    HISTORY_REWRITTEN: a token of the prompt or environment in the history changed. RETOKENISED: a token in an earlier completion
    changed. ENVIRONMENT: the prompt extends the history, but the tokens after it differ. TRUNCATED: the prompt ends within the
    history. PROMPT: the first prompt differs.
    """

    HISTORY_REWRITTEN = "history_rewritten"
    RETOKENISED = "retokenised"
    ENVIRONMENT = "environment"
    TRUNCATED = "truncated"
    PROMPT = "prompt"


@dataclass(frozen=True, slots=True)
class Drift:
    """The prompt that a trainer reported is not what the ledger predicted.

    Args:
        kind: where the difference is.
        index: the first token that differs, counted from the start of the prompt.
        expected: length of the predicted prompt in tokens.
        reported: length of the reported prompt in tokens.
    """

    kind: DriftKind
    index: int
    expected: int
    reported: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """The tokens that the server's rendering expects between the ledger and the next completion.

    Args:
        closing: the stop token that the last completion lacks, for example because it was cut by length; usually empty.
        environment: the tokens after it: tool results, further messages and the generation prompt.
    """

    closing: Tokens
    environment: Tokens


@dataclass(frozen=True, slots=True)
class Turn:
    """The tokens of one turn. At least one of `predicted` and `reported` is required.

    Args:
        number: the turn, from 1.
        answer: ids of the completion.
        logprobs: one per id of `answer`, or None if the trainer sent none.
        predicted: what the server's rendering expects before the completion; None without a tokenizer.
        reported: the prompt as the trainer reports it, without its first `shared` tokens; None if it reports none.
        runs: the policies that sampled the completion, in order, with all its tokens; empty: one policy, which is unknown.
        planes: values that the trainer sent beside the generated tokens, such as expert routing.
        shared: number of tokens at the start of the reported prompt that are known to equal the ledger's first tokens.
    """

    number: int
    answer: Tokens
    logprobs: Logprobs | None = None
    predicted: Prediction | None = None
    reported: Tokens | None = None
    runs: tuple[PolicyRun, ...] = ()
    planes: tuple[Plane, ...] = ()
    shared: int = 0


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """The end of a turn, or the present, as a place where a branch may begin.

    Args:
        origin: the origin of such a branch.
        stem: the segment with whose first `origin.parent_tokens` tokens it begins; None if no tokens are known.
        gap: tokens are missing there.
    """

    origin: Origin
    stem: Segment | None
    gap: bool


class LedgerView(Protocol):
    """Read-only view of the ledger of one conversation; samplers get it."""

    @property
    def gap(self) -> bool:
        """Whether the tokens of a turn are missing, so that no prompt can extend the segment."""

    @property
    def origin(self) -> Origin:
        """The origin of the segment that the next turn continues, as far as it is known before the first prompt."""

    @property
    def tokens(self) -> int:
        """The number of tokens that the next prompt must begin with."""

    def prefix(self) -> Tokens:
        """Return a copy of the tokens that the next prompt must begin with."""

    def authorship(self) -> Sequence[Span]:
        """Return the spans of these tokens. In a branch they include those inherited from its parent."""

    def extends(self, prompt: Tokens) -> bool:
        """Return whether a whole prompt extends these tokens. If not, its turn opens a segment."""


class ConversationLedger:
    """The ledger of one conversation.

    Args:
        ledger: the rollout's list of segments.
        segment_id: the id of its first segment.
        origin: the origin of its first segment; the first prompt completes it.
        stem: the segment whose first `origin.parent_tokens` tokens a branch starts with; None starts empty.
        gap: tokens of at least one turn since the last commit are missing, so that no prompt can extend the segment.
        role: the role of the conversation, and so of all its segments.

    Attributes:
        id: the id of the segment that the next turn continues, also before that segment is opened.
    """

    def __init__(
        self,
        ledger: Ledger,
        segment_id: str,
        origin: Origin,
        stem: Segment | None = None,
        *,
        gap: bool = False,
        role: Role = AGENT,
    ) -> None:
        self.id = segment_id
        self.role = role
        self.segment: Segment | None = None
        self.gap = gap
        self._ledger = ledger
        self._origin = origin
        self._stem = stem

    @property
    def origin(self) -> Origin:
        """The origin of the segment that the next turn continues."""
        return self._origin if self.segment is None else self.segment.origin

    @property
    def tokens(self) -> int:
        """The number of tokens that the next prompt must begin with."""
        return len(self.segment) if self.segment is not None else self._origin.parent_tokens

    def prefix(self) -> Tokens:
        """Return the tokens that the next prompt must begin with."""
        holder = self.segment or self._stem
        return holder.ids(0, self.tokens) if holder is not None else pack_tokens()

    def authorship(self) -> Sequence[Span]:
        """Return the spans of these tokens, with their authors."""
        holder = self.segment or self._stem
        return holder.authorship(self.tokens) if holder is not None else ()

    def extends(self, prompt: Tokens) -> bool:
        """Return whether a whole prompt extends these tokens. If not, its turn opens a segment."""
        return not self.gap and prompt[: self.tokens] == self.prefix()

    def branch_point(self) -> BranchPoint:
        """Return the point after the tokens held now."""
        holder = self.segment or self._stem
        origin = Origin(SegmentKind.BRANCH, self.id if holder is None else holder.id, self.tokens)
        return BranchPoint(origin, holder, self.gap)

    def branch(
        self, role: Role = AGENT, point: BranchPoint | None = None, parting: Parting | None = None
    ) -> ConversationLedger:
        """Return a ledger that starts with the tokens held at a point of this conversation; None: now."""
        at = point or self.branch_point()
        origin = replace(at.origin, parting=parting)
        return ConversationLedger(self._ledger, self._ledger.reserve(), origin, at.stem, gap=at.gap, role=role)

    def commit(self, turn: Turn) -> Drift | None:
        """Append one turn: the tokens before the completion, then the completion. Return the drift, or None.

        Raises ValueError for a turn without any prompt, for one without a reported prompt after a gap, and for lengths that do not
        match.
        """
        if turn.logprobs is not None and len(turn.logprobs) != len(turn.answer):
            raise ValueError("the numbers of logprobs and of tokens differ")
        if turn.runs and sum(run.tokens for run in turn.runs) != len(turn.answer):
            raise ValueError("the runs of the policies have other tokens than the completion")
        if not 0 <= turn.shared <= self.tokens:
            raise ValueError("the prompt shares more tokens than the ledger holds")
        segment, drift = self._add_prompt(turn)
        self.gap = False
        segment.verified = segment.verified and turn.reported is not None
        _append_completion(segment, turn)
        return drift

    def _add_prompt(self, turn: Turn) -> tuple[Segment, Drift | None]:
        segment = self.segment
        # Fast path: the sampler compared the history already, so the whole prompt need not be rebuilt in each turn.
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
        """Return the turn with all tokens of its reported prompt."""
        if turn.reported is None or not turn.shared:
            return turn
        return replace(turn, reported=self.prefix()[: turn.shared] + turn.reported, shared=0)

    def _begin(self, turn: Turn) -> tuple[Segment, Drift | None]:
        """Open the first segment. In a branch, its prompt starts with the parent's tokens."""
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
        """Return the spans of a branch's first prompt: the parent's and the added ones; none if it does not extend the parent."""
        if self._stem is None or not self.extends(prompt):
            return ()
        length = self.tokens
        closing = turn.predicted.closing if turn.predicted is not None else pack_tokens()
        cut = length + len(closing) if prompt[length : length + len(closing)] == closing else length
        added = (MaskReason.CLOSING, length, cut), (MaskReason.ENVIRONMENT, cut, len(prompt))
        spans = [Span(Author.OTHER, reason, turn.number, start, stop) for reason, start, stop in added if start < stop]
        return (*self.authorship(), *spans)

    def _open_after_gap(self, segment: Segment | None, turn: Turn) -> Segment:
        """Open a segment with the whole prompt.

        A prediction starts at the end of the turn whose tokens are unknown, so it cannot be compared with this prompt.
        """
        if turn.reported is None:
            raise ValueError("after a gap the trainer must report its prompt")
        shared = first_difference(self.prefix(), turn.reported)
        origin = replace(self._origin, parent_tokens=shared)
        if segment is not None:
            origin = Origin(SegmentKind.GAP, segment.id, shared)
        return self._open(origin, turn.reported, turn.number)

    def _open(self, origin: Origin, prompt: Tokens, turn: int, inherited: Sequence[Span] = ()) -> Segment:
        # The first segment takes the id under which records already refer to this conversation.
        self.id = self.id if self.segment is None else self._ledger.reserve()
        self.segment = Segment(self.id, origin, inherited, self.role)
        self.segment.append_masked(prompt, MaskReason.PROMPT, turn)
        self._ledger.add(self.segment)
        return self.segment


class Ledger:
    """The segments of a rollout, nearly always one.

    Attributes:
        main: the ledger of the first conversation.
    """

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._reserved = 0
        self.main = self.open(Origin(SegmentKind.MAIN))

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments in the order in which they were opened."""
        return tuple(self._segments)

    def open(self, origin: Origin, role: Role = AGENT) -> ConversationLedger:
        """Return the ledger of a new, empty conversation."""
        return ConversationLedger(self, self.reserve(), origin, role=role)

    @property
    def next_id(self) -> str:
        """The id that `reserve` returns next."""
        return str(self._reserved)

    def reserve(self) -> str:
        """Return a new segment id. It stays unused if the conversation has no turn."""
        segment_id, self._reserved = self.next_id, self._reserved + 1
        return segment_id

    def add(self, segment: Segment) -> None:
        """Append a segment that was opened."""
        self._segments.append(segment)


def _append_completion(segment: Segment, turn: Turn) -> None:
    """Append the completion of a turn: a span for each policy that sampled some of it."""
    start, tokens = 0, len(turn.answer)
    for run in turn.runs or [PolicyRun(tokens)] * bool(tokens):
        stop = start + run.tokens
        planes = tuple(plane.part(start, stop, tokens) for plane in turn.planes)
        span = Span(Author.MODEL, None, turn.number, 0, 0, run.version, planes=planes, policy_step=run.step)
        values = turn.logprobs[start:stop] if turn.logprobs is not None else None
        segment.append_generated(turn.answer[start:stop], values, span)
        start = stop


def _extend(segment: Segment, turn: Turn, environment: Tokens) -> Drift | None:
    """Append what a prompt that extends the segment adds to it. Return the drift, or None."""
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
    """Return the drift between the first `length` tokens of a segment and a prompt that does not extend them."""
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

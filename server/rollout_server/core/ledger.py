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

Laws (tests/core/test_ledger.py): authorship decides the mask; spans concatenated are what the model saw and wrote; ids, mask and
logprobs have equal length, with 0.0 for tokens the model did not write and nothing at all where the trainer sent no
logprobs; spans are only added; a segment, as it is handed out, ends with a token of the model
as soon as there is one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from rollout_server.core.prefix import first_difference

Tokens: TypeAlias = "array[int]"
"""Token ids, each below 2^31, in an array of unsigned 32-bit integers."""

Logprobs: TypeAlias = "array[float]"
"""Natural logarithms of probabilities, in an array of 32-bit floats."""

MAX_TOKEN_ID = 2**31 - 1


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


class DriftKind(Enum):
    """What parted between the prompt a trainer reports and ledger + what was appended."""

    HISTORY_REWRITTEN = "history_rewritten"
    RETOKENISED = "retokenised"
    ENVIRONMENT = "environment"
    TRUNCATED = "truncated"
    PROMPT = "prompt"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a segment comes from: the segment it follows and how many tokens at its start it shares with it."""

    kind: SegmentKind
    parent_id: str = ""
    parent_tokens: int = 0


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

    @property
    def trains(self) -> bool:
        """The model wrote it and nobody masked it out."""
        return self.author is Author.MODEL and self.reason is None


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
        reported: the whole prompt as the trainer reports it; None where it does not.
        policy_version: the policy that wrote the answer.
    """

    number: int
    answer: Tokens
    logprobs: Logprobs | None = None
    predicted: Prediction | None = None
    reported: Tokens | None = None
    policy_version: str = ""


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
    """A stretch of ledger in which every prompt extends the last. Append-only."""

    def __init__(self, segment_id: str, origin: Origin) -> None:
        self.id = segment_id
        self.origin = origin
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

    def append_generated(self, turn: Turn) -> None:
        """Adds what the model wrote in this turn."""
        if not turn.answer:
            return
        start = len(self._ids)
        known = turn.logprobs is not None
        span = Span(Author.MODEL, None, turn.number, start, start + len(turn.answer), turn.policy_version, known)
        self._add(turn.answer, span, turn.logprobs)
        self._settled = len(self._spans)

    def _add(self, ids: Tokens, span: Span, values: Logprobs | None) -> None:
        self._ids.extend(ids)
        self._logprobs.extend(_zeros(len(ids)) if values is None else values)
        self._spans.append(span)


class Ledger:
    """The segments of a rollout, nearly always one."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._gap = False

    @property
    def segments(self) -> tuple[Segment, ...]:
        """In the order in which they were opened."""
        return tuple(self._segments)

    @property
    def current(self) -> Segment | None:
        """The segment that the next turn continues; None before the first answer."""
        return self._segments[-1] if self._segments else None

    @property
    def gap(self) -> bool:
        """The tokens of at least one turn are missing since the last commit."""
        return self._gap

    @property
    def current_id(self) -> str:
        """The id of the segment that the next turn continues."""
        return str(max(len(self._segments) - 1, 0))

    def skip(self) -> None:
        """The tokens of a turn are unknown, so nothing that follows can extend the current segment."""
        self._gap = True

    def commit(self, turn: Turn) -> Drift | None:
        """Adds one turn: what stood before the answer, then the answer. Returns the drift that was found.

        Raises ValueError for a turn without any prompt, and for one without a reported prompt after a gap.
        """
        if turn.logprobs is not None and len(turn.logprobs) != len(turn.answer):
            raise ValueError("as many logprobs as tokens are needed")
        drift = self._add_prompt(turn)
        self._gap = False
        segment = self._segments[-1]
        segment.verified = segment.verified and turn.reported is not None
        segment.append_generated(turn)
        return drift

    def _add_prompt(self, turn: Turn) -> Drift | None:
        segment = self.current
        if self._gap:
            self._open_after_gap(segment, turn)
            return None
        if segment is None:
            return self._add_first_prompt(turn)
        if turn.reported is None:
            self._add_environment(segment, _need(turn.predicted), turn.number)
            return None
        held = len(segment)
        if turn.reported[:held] != segment.ids():
            drift = _parted(segment, turn)
            self._open(Origin(SegmentKind.DRIFT, segment.id, drift.index), turn.reported, turn.number)
            return drift
        return self._extend(segment, turn, turn.reported[held:])

    def _extend(self, segment: Segment, turn: Turn, environment: Tokens) -> Drift | None:
        """Adds what a prompt that extends the segment holds beyond it."""
        predicted = turn.predicted
        expected = predicted.closing + predicted.environment if predicted is not None else environment
        if predicted is not None and environment == expected:
            self._add_environment(segment, predicted, turn.number)
            return None
        held = len(segment)
        segment.append_masked(environment, MaskReason.ENVIRONMENT, turn.number)
        if environment == expected:
            return None
        index = held + first_difference(expected, environment)
        return Drift(DriftKind.ENVIRONMENT, index, held + len(expected), held + len(environment))

    def _add_first_prompt(self, turn: Turn) -> Drift | None:
        predicted = turn.predicted.environment if turn.predicted is not None else None
        prompt = turn.reported if turn.reported is not None else _need(turn.predicted).environment
        self._open(Origin(SegmentKind.MAIN), prompt, turn.number)
        if predicted is None or predicted == prompt:
            return None
        return Drift(DriftKind.PROMPT, first_difference(predicted, prompt), len(predicted), len(prompt))

    def _open_after_gap(self, segment: Segment | None, turn: Turn) -> None:
        """Opens a segment with the whole prompt. A prediction starts where the unknown turn ended, so it predicts nothing here."""
        if turn.reported is None:
            raise ValueError("after a gap a reported prompt is needed")
        origin = Origin(SegmentKind.MAIN)
        if segment is not None:
            origin = Origin(SegmentKind.GAP, segment.id, first_difference(segment.ids(), turn.reported))
        self._open(origin, turn.reported, turn.number)

    def _add_environment(self, segment: Segment, predicted: Prediction, turn: int) -> None:
        segment.append_masked(predicted.closing, MaskReason.CLOSING, turn)
        segment.append_masked(predicted.environment, MaskReason.ENVIRONMENT, turn)

    def _open(self, origin: Origin, prompt: Tokens, turn: int) -> None:
        segment = Segment(str(len(self._segments)), origin)
        segment.append_masked(prompt, MaskReason.PROMPT, turn)
        self._segments.append(segment)


def _parted(segment: Segment, turn: Turn) -> Drift:
    reported = turn.reported if turn.reported is not None else pack_tokens()
    index = first_difference(segment.ids(), reported)
    if index == len(reported):
        kind = DriftKind.TRUNCATED
    elif segment.author_at(index) is Author.MODEL:
        kind = DriftKind.RETOKENISED
    else:
        kind = DriftKind.HISTORY_REWRITTEN
    added = len(turn.predicted.closing) + len(turn.predicted.environment) if turn.predicted is not None else 0
    return Drift(kind, index, len(segment) + added, len(reported))


def _need(predicted: Prediction | None) -> Prediction:
    if predicted is None:
        raise ValueError("a turn needs a predicted or a reported prompt")
    return predicted

"""A ledger as plain lists of tokens with their authors: what the real one is held against.

Written from the laws in the ledger's theory, not from its code; nothing is compact, nothing is shared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

from rollout_server.core.ledger import Author, Ledger, MaskReason, Segment, Turn, pack_logprobs

MODEL = "model"


@dataclass
class Token:
    """One token: its id, who or what put it there ("model" or the reason of its mask), and when."""

    id: int
    by: str
    turn: int
    policy: str = ""
    logprob: float | None = None


@dataclass
class NaiveSegment:
    """A training sample: where it comes from and its tokens, the first `prompt` of them what it opened with."""

    kind: str
    parent: str
    shared: int
    prompt: int
    verified: bool
    tokens: list[Token]

    def ids(self) -> list[int]:
        return [t.id for t in self.tokens]

    def trajectory(self) -> list[Token]:
        """Up to the last token of the model; the prompt at least."""
        last = max((i + 1 for i, t in enumerate(self.tokens) if t.by == MODEL), default=self.prompt)
        return self.tokens[:last]


@dataclass
class NaiveLedger:
    """Segments, every token that was ever sampled and recorded, and whether the tokens of a turn are missing since."""

    segments: list[NaiveSegment] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    missing: bool = False

    def skip(self) -> None:
        """The tokens of a turn are unknown."""
        self.missing = True

    def commit(self, turn: Turn) -> tuple[str, int, int, int] | None:
        """Adds a turn; returns the drift as (kind, index, expected, reported)."""
        closing = [] if turn.predicted is None else list(turn.predicted.closing)
        environment = [] if turn.predicted is None else list(turn.predicted.environment)
        reported = None if turn.reported is None else list(turn.reported)
        predicts = turn.predicted is not None
        if self.missing:
            assert reported is not None
            drift = self._after_gap(turn.number, reported)
        elif not self.segments:
            drift = self._first(turn.number, environment if predicts else None, reported)
        else:
            drift = self._next(turn.number, (closing, environment) if predicts else None, reported)
        segment = self.segments[-1]
        segment.verified = segment.verified and reported is not None
        logprobs = [None] * len(turn.answer) if turn.logprobs is None else list(turn.logprobs)
        answer = zip(turn.answer, logprobs, strict=True)
        segment.tokens += [Token(i, MODEL, turn.number, turn.policy_version, p) for i, p in answer]
        self.sampled += list(turn.answer)
        return drift

    def _first(
        self, turn: int, predicted: list[int] | None, reported: list[int] | None
    ) -> tuple[str, int, int, int] | None:
        prompt = reported if reported is not None else predicted
        assert prompt is not None
        self._open("main", "", 0, prompt, turn)
        if reported is None or predicted is None or reported == predicted:
            return None
        return "prompt", common(predicted, reported), len(predicted), len(reported)

    def _next(
        self, turn: int, predicted: tuple[list[int], list[int]] | None, reported: list[int] | None
    ) -> tuple[str, int, int, int] | None:
        segment = self.segments[-1]
        held = segment.ids()
        closing, environment = predicted or ([], [])
        expected = held + closing + environment
        if reported is None or (predicted is not None and reported == expected):
            segment.tokens += masked(closing, "closing", turn) + masked(environment, "environment", turn)
            return None
        index = common(held, reported)
        if index == len(held):
            segment.tokens += masked(reported[len(held) :], "environment", turn)
            drifted = predicted is not None
            return ("environment", common(expected, reported), len(expected), len(reported)) if drifted else None
        if index == len(reported):
            kind = "truncated"
        else:
            kind = "retokenised" if segment.tokens[index].by == MODEL else "history_rewritten"
        self._open("drift", str(len(self.segments) - 1), index, reported, turn)
        return kind, index, len(expected), len(reported)

    def _after_gap(self, turn: int, reported: list[int]) -> None:
        """Nobody knows what stands where in the prompt, so all of it is one, and nothing can have parted."""
        self.missing = False
        if not self.segments:
            return self._open("main", "", 0, reported, turn)
        shared = common(self.segments[-1].ids(), reported)
        return self._open("gap", str(len(self.segments) - 1), shared, reported, turn)

    def _open(self, kind: str, parent: str, shared: int, prompt: list[int], turn: int) -> None:
        self.segments.append(NaiveSegment(kind, parent, shared, len(prompt), True, masked(prompt, "prompt", turn)))


def masked(ids: list[int], reason: str, turn: int) -> list[Token]:
    return [Token(i, reason, turn) for i in ids]


def common(a: list[int], b: list[int]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def assert_laws(ledger: Ledger, naive: NaiveLedger) -> None:
    """The laws of the ledger, each stated against the naive one."""
    assert [s.id for s in ledger.segments] == [str(i) for i in range(len(naive.segments))]
    assert ledger.current_id == (ledger.segments[-1].id if ledger.segments else "0")
    assert ledger.gap is naive.missing
    for real, plain in zip(ledger.segments, naive.segments, strict=True):
        _assert_segment(real, plain)
    trained = [i for s in ledger.segments for i, bit in zip(s.sample().response_ids, s.sample().response_mask) if bit]  # noqa: B905
    assert trained == naive.sampled, "a sampled token is trained exactly once"


def _assert_segment(real: Segment, plain: NaiveSegment) -> None:
    assert (real.origin.kind.value, real.origin.parent_id, real.origin.parent_tokens) == (
        plain.kind,
        plain.parent,
        plain.shared,
    )
    assert real.verified is plain.verified
    assert len(real) == len(plain.tokens)
    assert list(real.ids()) == plain.ids(), "concatenated, the ledger is what the model saw and wrote"
    assert real.logprobs() == pack_logprobs(t.logprob or 0.0 for t in plain.tokens)
    _assert_spans(real, plain)
    _assert_sample(real, plain)


def _assert_spans(real: Segment, plain: NaiveSegment) -> None:
    """Spans lie end to end, one author each, and tell of each token who wrote it, when, and why it is masked."""
    trajectory = plain.trajectory()
    spans = real.spans
    assert [s.start for s in spans] == [0, *(s.stop for s in spans[:-1])]
    assert spans[0].reason is MaskReason.PROMPT
    assert all(s.stop > s.start for s in spans[1:])
    told = [
        (MODEL if s.reason is None else s.reason.value, s.turn, s.policy_version, s.logprobs_known)
        for s in spans
        for _ in range(s.start, s.stop)
    ]
    assert told == [(t.by, t.turn, t.policy, t.logprob is not None) for t in trajectory]
    assert all(s.trains is (s.author is Author.MODEL) is (s.reason is None) for s in spans)
    runs = [key for key, _ in groupby(told)]
    assert len([s for s in spans if s.stop > s.start]) == len(runs), "one run of one author in one turn is one span"


def _assert_sample(real: Segment, plain: NaiveSegment) -> None:
    """The sample is a view of the spans: equal lengths, mask by author, logprobs known or not there at all."""
    trajectory = plain.trajectory()
    prompt, response = trajectory[: plain.prompt], trajectory[plain.prompt :]
    sample = real.sample()
    assert sample.segment_id == real.id
    assert list(sample.prompt_ids) == [t.id for t in prompt]
    assert list(sample.response_ids) == [t.id for t in response]
    assert list(sample.response_mask) == [int(t.by == MODEL) for t in response]
    if all(t.logprob is not None for t in response if t.by == MODEL):
        assert sample.logprobs == pack_logprobs(t.logprob or 0.0 for t in response)
    else:
        assert sample.logprobs is None
    assert not response or response[-1].by == MODEL, "a trajectory ends with what the model wrote last"

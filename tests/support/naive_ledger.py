"""A ledger as plain lists of tokens with their authors, as an oracle for the real one.

It is written from the laws in the ledger's docstring, not from its code. Nothing is compact and nothing is shared.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import groupby

from rollout_server.core.ledger import (
    AGENT,
    Author,
    ConversationLedger,
    Ledger,
    MaskReason,
    Parting,
    Role,
    Segment,
    Span,
    Turn,
    pack_logprobs,
    pack_tokens,
)

MODEL = "model"


@dataclass
class Token:
    """One token: its id, its author ("model" or the reason for its mask) and its turn."""

    id: int
    by: str
    turn: int
    policy: tuple[str, int | None] = ("", None)
    logprob: float | None = None
    out: bool = False
    """An agent's author masked it out."""

    @property
    def trains(self) -> bool:
        return self.by == MODEL and not self.out


@dataclass
class NaiveSegment:
    """A training sample: its origin and tokens. The first `prompt` tokens are the prompt that opened it."""

    id: str
    kind: str
    parent: str
    shared: int
    prompt: int
    verified: bool
    tokens: list[Token]
    role: Role = AGENT
    parting: Parting | None = None

    def ids(self) -> list[int]:
        return [t.id for t in self.tokens]

    def trajectory(self) -> list[Token]:
        """Tokens up to the last one of the model; at least the prompt."""
        last = max((i + 1 for i, t in enumerate(self.tokens) if t.by == MODEL), default=self.prompt)
        return self.tokens[:last]


@dataclass
class NaiveLedger:
    """Segments in the order in which they opened, a record of every sampled token, and the number of assigned ids."""

    segments: list[NaiveSegment] = field(default_factory=list)
    sampled: list[tuple[int, int]] = field(default_factory=list)
    taken: int = 0

    def __post_init__(self) -> None:
        self.main = self.line("main")

    def line(self, kind: str, parent: str = "", role: Role = AGENT) -> NaiveLine:
        """A conversation that starts without tokens."""
        return NaiveLine(self, self.take(), kind, parent, role=role)

    def take(self) -> str:
        self.taken += 1
        return str(self.taken - 1)


@dataclass
class NaiveLine:
    """The segments of one conversation.

    `missing`: the tokens of a turn are unknown since the last commit. `before`: tokens inherited from another conversation
    before the first segment. `parent`: the segment that they belong to.
    """

    ledger: NaiveLedger
    id: str
    kind: str
    parent: str
    before: list[Token] = field(default_factory=list)
    segment: NaiveSegment | None = None
    missing: bool = False
    role: Role = AGENT
    parting: Parting | None = None

    def tokens(self) -> list[Token]:
        return list(self.before if self.segment is None else self.segment.tokens)

    def ids(self) -> list[int]:
        return [t.id for t in self.tokens()]

    def branch(self, role: Role = AGENT) -> NaiveLine:
        """Another conversation that continues from here."""
        return replace(self.here(), id=self.ledger.take(), role=role)

    def here(self) -> NaiveLine:
        """A branch from here, without an id."""
        parent = self.id if self.segment is not None or not self.before else self.parent
        return NaiveLine(self.ledger, "", "branch", parent, self.tokens(), missing=self.missing)

    def skip(self) -> None:
        """Record that the tokens of a turn are unknown."""
        self.missing = True

    def commit(self, turn: Turn) -> tuple[str, int, int, int] | None:
        """Add a turn. Returns the drift as (kind, index, expected, reported)."""
        closing = [] if turn.predicted is None else list(turn.predicted.closing)
        environment = [] if turn.predicted is None else list(turn.predicted.environment)
        reported = None if turn.reported is None else list(turn.reported)
        drift = self._prompt(turn.number, (closing, environment) if turn.predicted is not None else None, reported)
        segment = self.segment
        assert segment is not None
        segment.verified = segment.verified and reported is not None
        logprobs = [None] * len(turn.answer) if turn.logprobs is None else list(turn.logprobs)
        answer = zip(turn.answer, logprobs, strict=True)
        policies = [(run.version, run.step) for run in turn.runs for _ in range(run.tokens)]
        policies = policies or [("", None)] * len(turn.answer)
        segment.tokens += [
            Token(i, MODEL, turn.number, policy, p) for (i, p), policy in zip(answer, policies, strict=True)
        ]
        self.ledger.sampled += [(turn.number, i) for i in turn.answer]
        return drift

    def _prompt(
        self, turn: int, predicted: tuple[list[int], list[int]] | None, reported: list[int] | None
    ) -> tuple[str, int, int, int] | None:
        held, (closing, environment) = self.ids(), predicted or ([], [])
        expected = held + closing + environment
        if self.missing:
            # The authors in this prompt are unknown, so the whole prompt is masked as one, and there is nothing to compare
            # it with.
            assert reported is not None
            self.missing = False
            self._open("gap", common(held, reported), reported, turn)
            return None
        if reported is None or (reported == expected and predicted is not None):
            if self.segment is None:
                self._open("", len(held), expected, turn)
            else:
                self.segment.tokens += masked(closing, "closing", turn) + masked(environment, "environment", turn)
            return None
        index = common(held, reported)
        if index == len(held):
            began = bool(held)
            if self.segment is None:
                self._open("", len(held), reported, turn)
            else:
                self.segment.tokens += masked(reported[len(held) :], "environment", turn)
                began = True
            if predicted is None:
                return None
            kind = "environment" if began else "prompt"
            return kind, common(expected, reported), len(expected), len(reported)
        kind = "truncated"
        if index < len(reported):
            kind = "retokenised" if self.tokens()[index].by == MODEL else "history_rewritten"
        self._open("drift", index, reported, turn)
        return kind, index, len(expected), len(reported)

    def _open(self, kind: str, shared: int, prompt: list[int], turn: int) -> None:
        if self.segment is None:
            opened = NaiveSegment(self.id, self.kind, self.parent, shared, len(prompt), True, [], parting=self.parting)
        else:
            opened = NaiveSegment(self.ledger.take(), kind, self.segment.id, shared, len(prompt), True, [])
        opened.tokens, opened.role = masked(prompt, "prompt", turn), self.role
        self.id, self.segment = opened.id, opened
        self.ledger.segments.append(opened)


def masked(ids: list[int], reason: str, turn: int) -> list[Token]:
    return [Token(i, reason, turn) for i in ids]


def common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def assert_laws(ledger: Ledger, naive: NaiveLedger) -> None:
    """Assert the laws of the ledger, each against the naive ledger."""
    assert [s.id for s in ledger.segments] == [s.id for s in naive.segments]
    assert len({s.id for s in ledger.segments}) == len(ledger.segments)
    for real, plain in zip(ledger.segments, naive.segments, strict=True):
        _assert_segment(real, plain)
    trained = [
        (s.turn, i) for each in ledger.segments for s in each.spans if s.trains for i in each.ids(s.start, s.stop)
    ]
    taken_out = [
        (s.turn, i) for each in ledger.segments for s in each.spans if _by_author(s) for i in each.ids(s.start, s.stop)
    ]
    assert sorted(trained + taken_out) == sorted(naive.sampled), (
        "a sampled token is trained once, or masked out by the agent's author"
    )


def assert_line(line: ConversationLedger, naive: NaiveLine) -> None:
    """Assert the state of one conversation."""
    assert (line.id, line.gap, list(line.prefix())) == (naive.id, naive.missing, naive.ids())
    assert (line.segment is None) is (naive.segment is None)
    assert line.segment is None or line.segment.id == line.id
    assert [i for s in line.authorship() for i in range(s.start, s.stop)] == list(range(line.tokens))
    assert line.extends(line.prefix() + pack_tokens([1])) is not line.gap
    assert line.segment is None or line.origin == line.segment.origin


def _by_author(span: Span) -> bool:
    return span.reason is MaskReason.AUTHOR


def _assert_segment(real: Segment, plain: NaiveSegment) -> None:
    assert (real.origin.kind.value, real.origin.parent_id, real.origin.parent_tokens) == (
        plain.kind,
        plain.parent,
        plain.shared,
    )
    assert (real.role, real.verified, real.origin.parting) == (plain.role, plain.verified, plain.parting)
    assert len(real) == len(plain.tokens)
    assert list(real.ids()) == plain.ids(), "the concatenated ledger is what the model saw and generated"
    assert real.logprobs() == pack_logprobs(t.logprob or 0.0 for t in plain.tokens)
    _assert_spans(real, plain)
    _assert_sample(real, plain)


def _assert_spans(real: Segment, plain: NaiveSegment) -> None:
    """Assert that spans are adjacent, have one author each, and give author, turn and mask reason of every token."""
    trajectory = plain.trajectory()
    spans = real.spans
    assert [s.start for s in spans] == [0, *(s.stop for s in spans[:-1])]
    assert spans[0].reason is MaskReason.PROMPT
    assert all(s.stop > s.start for s in spans[1:])
    told = [
        (MODEL if s.reason is None else s.reason.value, s.turn, (s.policy_version, s.policy_step), s.logprobs_known)
        for s in spans
        for _ in range(s.start, s.stop)
    ]
    assert told == [("author" if t.out else t.by, t.turn, t.policy, t.logprob is not None) for t in trajectory]
    assert all(s.trains is (s.author is Author.MODEL and s.reason is None) for s in spans)
    authors = [s.author is Author.MODEL for s in spans for _ in range(s.start, s.stop)]
    assert authors == [t.by == MODEL for t in trajectory]
    runs = [key for key, _ in groupby(told)]
    assert len([s for s in spans if s.stop > s.start]) == len(runs), (
        "consecutive tokens of one author and policy in one turn form one span"
    )


def _assert_sample(real: Segment, plain: NaiveSegment) -> None:
    """Assert that the sample follows from the spans: equal lengths, mask by author, logprobs known or absent."""
    trajectory = plain.trajectory()
    prompt, response = trajectory[: plain.prompt], trajectory[plain.prompt :]
    sample = real.sample()
    assert sample.segment_id == real.id
    assert list(sample.prompt_ids) == [t.id for t in prompt]
    assert list(sample.response_ids) == [t.id for t in response]
    assert list(sample.response_mask) == [int(t.trains) for t in response]
    if all(t.logprob is not None for t in response if t.by == MODEL):
        assert sample.logprobs == pack_logprobs((t.logprob or 0.0) if t.trains else 0.0 for t in response)
    else:
        assert sample.logprobs is None
    assert not response or response[-1].by == MODEL, "a trajectory ends with the last generated token"

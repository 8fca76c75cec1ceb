"""A segment of the ledger: a stretch of a conversation that only grows, and its training samples, nearly always one."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, TypeAlias, TypeVar

Tokens: TypeAlias = "array[int]"
"""Token ids, each below 2^31, in an array of unsigned 32-bit integers."""

Logprobs: TypeAlias = "array[float]"
"""Natural logarithms of probabilities, in an array of 32-bit floats."""

MAX_TOKEN_ID = 2**31 - 1
MAX_STEP = 2**63 - 1
"""The largest policy step."""

_Sequence = TypeVar("_Sequence", "array[int]", str)


def pack_tokens(ids: Iterable[int] = ()) -> Tokens:
    """Pack token ids. Raises OverflowError for an id outside 0 to 2^32 - 1."""
    return array("I", ids)


def pack_logprobs(values: Iterable[float] = ()) -> Logprobs:
    """Pack logprobs as 32-bit floats."""
    return array("f", values)


def _zeros(count: int) -> Logprobs:
    return array("f", bytes(4 * count))


class Author(Enum):
    """Who wrote a token: the model, or anyone else (prompt, tools, chat template)."""

    MODEL = "model"
    OTHER = "other"


class MaskReason(Enum):
    """Why a span is masked.

    PROMPT: before the first completion. ENVIRONMENT: between two completions. CLOSING: a stop token that the model did not
    generate and the server added. AUTHOR: generated, but masked out by the agent's author. STALE: generated, but by a policy that
    was too old when the rollout ended.
    """

    PROMPT = "prompt"
    ENVIRONMENT = "environment"
    CLOSING = "closing"
    AUTHOR = "author"
    STALE = "stale"


class SegmentKind(Enum):
    """Why a segment was opened.

    MAIN: the rollout's first. DRIFT: a prompt did not extend the segment before. GAP: the trainer sent no ids for a turn.
    COMPACTION, SUBAGENT and BRANCH: the agent forked the conversation. The calls of an agent that owns its loop open segments of
    these kinds and of DRIFT; their origin has a `Parting`.
    """

    MAIN = "main"
    DRIFT = "drift"
    COMPACTION = "compaction"
    SUBAGENT = "subagent"
    BRANCH = "branch"
    GAP = "gap"


@dataclass(frozen=True, slots=True)
class Parting:
    """Where a call of an agent that owns its loop parted from the conversations of its rollout.

    Args:
        message: index of the first message that differs from the closest conversation, from 0.
        field: what differs there; `Parting` in the proto file lists the words.
        expected: the text there so far, at most 200 characters.
        found: the text that the agent sent, at most 200 characters.
        api: the API of the call.
        client_agent: the client's id of the agent that called; empty for none.
    """

    message: int
    field: str
    expected: str = ""
    found: str = ""
    api: str = ""
    client_agent: str = ""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a segment comes from: the segment it follows, and the number of tokens at its start that both share.

    `parting` is set only if a call of an agent that owns its loop opened the segment's conversation.
    """

    kind: SegmentKind
    parent_id: str = ""
    parent_tokens: int = 0
    parting: Parting | None = None


@dataclass(frozen=True, slots=True)
class Role:
    """The part that a conversation plays in its rollout, declared when the conversation is opened.

    Args:
        name: chosen by the agent's author, such as "solver" or "critic".
        trainable: whether its samples train. The masks of its tokens say who wrote them in either case.
        model: name of the further model that generates its completions; empty for the request's completion target.
    """

    name: str = "agent"
    trainable: bool = True
    model: str = ""


AGENT: Final = Role()
"""The role of the first conversation, and of a fork that names none."""


@dataclass(frozen=True, slots=True)
class Plane:
    """Per-token values beside the ids, such as expert routing: equally many bytes for each token, never decoded here.

    `dtype` is the element type in NumPy's notation.
    """

    name: str
    dtype: str
    values: bytes = field(repr=False)

    def part(self, start: int, stop: int, tokens: int) -> Plane:
        """Return the values of the tokens from `start` to before `stop`, of a plane of `tokens` tokens."""
        size = len(self.values) // max(1, tokens)
        return replace(self, values=self.values[start * size : stop * size])


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """The part of a completion that one policy sampled.

    Args:
        tokens: the number of its tokens, at least 1.
        version: the policy, in the trainer's notation; empty if unknown.
        step: the step of the policy, from 0 to `MAX_STEP`; None if unknown. Later policies have larger steps.
    """

    tokens: int
    version: str = ""
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """A run of tokens with one author.

    Args:
        author: who wrote the tokens.
        reason: why they are masked; None if they are trained.
        turn: the turn that added them, from 1.
        start, stop: position in the segment, as in a slice.
        policy_version: the policy that generated them, in the trainer's notation.
        policy_step: the step of that policy; None if unknown.
        logprobs_known: whether the trainer sent their logprobs.
        planes: per-token values beside the ids.
    """

    author: Author
    reason: MaskReason | None
    turn: int
    start: int
    stop: int
    policy_version: str = ""
    logprobs_known: bool = False
    planes: tuple[Plane, ...] = ()
    policy_step: int | None = None

    @property
    def trains(self) -> bool:
        """Whether the mask is 1: the model generated the tokens and nothing masked them out."""
        return self.author is Author.MODEL and self.reason is None

    def is_stale(self, oldest: int) -> bool:
        """Whether the tokens train although their policy is older than the step `oldest`. An unknown step is never stale."""
        return self.trains and self.policy_step is not None and self.policy_step < oldest


@dataclass(frozen=True, slots=True)
class Sample:
    """A segment, or a part of it, as a training example.

    Args:
        segment_id: the segment.
        prompt_ids: ids of the prompt, all masked.
        response_ids: ids of everything after the prompt: completions and environment tokens.
        response_mask: one byte per id of `response_ids`; 1 for trained tokens, else 0.
        logprobs: one per id of `response_ids`, 0.0 where the mask is 0. None if at least one completion came without logprobs.
    """

    segment_id: str
    prompt_ids: Tokens
    response_ids: Tokens
    response_mask: bytes
    logprobs: Logprobs | None


class Segment:
    """The tokens and spans of one segment. Append-only.

    Args:
        segment_id: unique in the rollout.
        origin: where the segment comes from.
        inherited: for a branch, the spans of its prompt by who wrote the tokens in the parent. In this segment they are masked as
            prompt.
        role: the role of its conversation.

    Attributes:
        verified: whether the trainer reported the prompt of every turn.
    """

    def __init__(self, segment_id: str, origin: Origin, inherited: Sequence[Span] = (), role: Role = AGENT) -> None:
        self.id = segment_id
        self.role = role
        self.origin = origin
        self.inherited = tuple(inherited)
        self.verified = True
        self._ids: Tokens = pack_tokens()
        self._logprobs: Logprobs = pack_logprobs()
        self._spans: list[Span] = []
        self._settled = 0

    def __len__(self) -> int:
        """Return the number of tokens, including those that no completion follows yet."""
        return len(self._ids)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans up to the last completion. Tool results that no turn saw are not part of a trajectory."""
        return tuple(self._spans[: self._settled])

    def authorship(self, stop: int) -> tuple[Span, ...]:
        """Return the spans of the first `stop` tokens. A branch's prompt has the authors that its tokens had in the parent."""
        spans = (*self.inherited, *self._spans[1:]) if self.inherited else self._spans
        return tuple(span for span in spans if span.stop <= stop)

    def ids(self, start: int = 0, stop: int | None = None) -> Tokens:
        """Return a copy of the ids from `start` to before `stop`, including those that no completion follows yet."""
        return self._ids[start:stop]

    def logprobs(self, start: int = 0, stop: int | None = None) -> Logprobs:
        """Return a copy of the logprobs, 0.0 where the model did not generate the token or the logprob is unknown."""
        return self._logprobs[start:stop]

    def sample(self) -> Sample:
        """Return the whole segment as a training example: prompt, response, mask and logprobs."""
        return SamplePart.whole(self).sample()

    def author_at(self, index: int) -> Author:
        """Return the author of the token at `index`."""
        return next(s.author for s in self._spans if s.start <= index < s.stop)

    def append_masked(self, ids: Tokens, reason: MaskReason, turn: int) -> None:
        """Append tokens that the model did not generate."""
        if reason is MaskReason.PROMPT and not self._spans:
            self._settled = 1
            self._add(ids, Span(Author.OTHER, reason, turn, 0, len(ids)), None)
        elif ids:
            start = len(self._ids)
            self._add(ids, Span(Author.OTHER, reason, turn, start, start + len(ids)), None)

    def append_generated(self, ids: Tokens, logprobs: Logprobs | None, span: Span) -> None:
        """Append a completion. `span` carries its turn and policy version; its position is set here."""
        if not ids:
            return
        start, stop = len(self._ids), len(self._ids) + len(ids)
        known = logprobs is not None
        # `replace` takes several times as long, and a restart does this for every turn of every rollout.
        placed = Span(
            span.author, span.reason, span.turn, start, stop, span.policy_version, known, span.planes, span.policy_step
        )
        self._add(ids, placed, logprobs)
        self._settled = len(self._spans)

    def mask_turn(self, turn: int) -> None:
        """Mask the completion of a turn out, at the request of the agent's author. This cannot be undone."""
        self._spans = [
            replace(span, reason=MaskReason.AUTHOR) if span.author is Author.MODEL and span.turn == turn else span
            for span in self._spans
        ]

    def mask_stale(self, oldest: int) -> None:
        """Mask out what a policy older than the step `oldest` generated. This cannot be undone."""
        self._spans = [
            replace(span, reason=MaskReason.STALE) if span.is_stale(oldest) else span for span in self._spans
        ]

    def _add(self, ids: Tokens, span: Span, values: Logprobs | None) -> None:
        self._ids.extend(ids)
        self._logprobs.extend(_zeros(len(ids)) if values is None else values)
        self._spans.append(span)


@dataclass(frozen=True, slots=True)
class SamplePart:
    """A part of a segment that is one training sample; nearly always the whole segment.

    Args:
        segment: the segment.
        start, stop: the response, as in a slice of the segment's tokens. The prompt is all before it.
        index: the index of the part in its segment, from 0.
        stale: the policy of its trained tokens is too old.
    """

    segment: Segment
    start: int
    stop: int
    index: int = 0
    stale: bool = False

    @classmethod
    def whole(cls, segment: Segment) -> SamplePart:
        """Return a segment as one part."""
        spans = segment.spans
        return cls(segment, spans[0].stop, spans[-1].stop) if spans else cls(segment, 0, 0)

    @property
    def response(self) -> tuple[Span, ...]:
        """The spans of the response."""
        return tuple(span for span in self.segment.spans if self.start <= span.start and span.stop <= self.stop)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans of prompt and response. In a later part, the prompt is one span: an earlier part trains its completions."""
        if not self.index:
            return tuple(span for span in self.segment.spans if span.stop <= self.stop)
        response = self.response
        return (Span(Author.OTHER, MaskReason.PROMPT, response[0].turn, 0, self.start), *response)

    def sample(self) -> Sample:
        """Return the training example: prompt, response, mask and logprobs."""
        segment, spans = self.segment, self.response
        mask = b"".join((b"\x01" if span.trains else b"\x00") * (span.stop - span.start) for span in spans)
        known = all(span.logprobs_known for span in spans if span.author is Author.MODEL)
        values = self._trained_logprobs(spans) if known else None
        return Sample(segment.id, segment.ids(0, self.start), segment.ids(self.start, self.stop), mask, values)

    def _trained_logprobs(self, spans: Iterable[Span]) -> Logprobs:
        values = self.segment.logprobs(self.start, self.stop)
        for span in spans:
            if not span.trains:
                values[span.start - self.start : span.stop - self.start] = _zeros(span.stop - span.start)
        return values


def first_difference(a: _Sequence, b: _Sequence) -> int:
    """Return the first index at which `a` and `b` differ, or the shorter length if one is a prefix of the other.

    Binary search over slice comparisons, which run in C: faster than a loop in Python for long histories.
    """
    low, high = 0, min(len(a), len(b))
    while low < high:  # a[:low] == b[:low] always holds
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

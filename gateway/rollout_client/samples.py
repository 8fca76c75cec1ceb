"""Training samples: what an outcome brings back for a trainer, one for each segment of its ledger.

A sample needs no further thought: its prompt does not train, of its response exactly the tokens do whose mask is 1, and what
does not hold together is refused before anybody trains on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from google.protobuf.descriptor import EnumDescriptor
from osmosis.rollout.v1.outcome_pb2 import Failure, FailureCategory, Outcome
from osmosis.rollout.v1.rollout_service_pb2 import Rollout
from osmosis.rollout.v1.token_pb2 import Author, MaskReason, Sample, Segment, SegmentKind
from osmosis.rollout.v1.token_pb2 import SampleSpan as SpanProto

from rollout_client.proto_fields import enum_values

MODEL: Final = "model"
PROMPT: Final = "prompt"
ENVIRONMENT: Final = "environment"
#: For a value of a later version of the contract.
_OTHER: Final = "unspecified"


def _enum_names(kind: EnumDescriptor) -> Mapping[int, str]:
    return MappingProxyType({number: word for word, number in enum_values(kind).items()})


AUTHORS: Final = _enum_names(Author.DESCRIPTOR)
MASK_REASONS: Final = _enum_names(MaskReason.DESCRIPTOR)
SEGMENT_KINDS: Final = _enum_names(SegmentKind.DESCRIPTOR)
_CATEGORIES: Final = _enum_names(FailureCategory.DESCRIPTOR)


@dataclass(frozen=True, slots=True)
class SampleSpan:
    """A run of tokens with one author, from one turn.

    Args:
        author: "model", or "other" for prompt, template, tool and user.
        reason: why it does not train: "prompt", "environment", "closing" (the end token that a cut answer lacks) or "author"
            (the agent's author masked it out); None: it trains.
        turn: from 1, the one whose prompt or answer it belongs to.
        start: its first token, counted from the start of the prompt.
        stop: behind its last token.
        policy_version: the policy that sampled it, in the trainer's words; empty: unknown.
    """

    author: str
    reason: str | None
    turn: int
    start: int
    stop: int
    policy_version: str = ""

    @property
    def trains(self) -> bool:
        """The model wrote it and nobody masked it out."""
        return self.author == MODEL and self.reason is None


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One training sample: a prompt that does not train, and the tokens after it, of which the last is the model's.

    Raises ValueError for values that do not fit each other.

    Args:
        segment_id: the segment of the ledger that it is.
        prompt_ids: token ids, all masked.
        response_ids: token ids, at least one.
        response_mask: 1 for each response id that the model wrote and that trains, 0 for the others.
        logprobs: one natural logarithm for each response id, 0.0 where masked; None: at least one answer came without them.
        spans: who wrote which token of prompt and response, without gaps; None: the server did not say.
        kind: how the segment came to be: "main", "drift", "gap", ...; empty: the server did not say.
        parent_id: the segment that it follows; empty for the first.
        parent_tokens: how many tokens at its start it shares with that one.
        verified: the trainer reported every prompt of it; None: the server did not say.
        uid: the server's id of the rollout.
        rollout_id: the caller's.
        group_id: of the rollouts that are compared with each other.
        end: how the rollout ended: "stop", "failure" or "cancellation"; empty: not known.
        reason: why: a word of the agent's, the category of the failure, or what was said when it was cancelled.
        truncated: the sample ends with the rollout's last answer, which was cut by length.
        reward: of the whole rollout; None: there is none.
        scores: named parts of it.
        completion_ms: what the rollout spent waiting for answers, in milliseconds.
        tool_ms: and for tools.
    """

    segment_id: str
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    logprobs: list[float] | None
    spans: tuple[SampleSpan, ...] | None = None
    kind: str = ""
    parent_id: str = ""
    parent_tokens: int = 0
    verified: bool | None = None
    uid: str = ""
    rollout_id: str = ""
    group_id: str = ""
    end: str = ""
    reason: str = ""
    truncated: bool = False
    reward: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    completion_ms: float = 0.0
    tool_ms: float = 0.0

    def __post_init__(self) -> None:
        for fault in (_fault_of_lists(self), _fault_of_spans(self)):
            if fault:
                raise ValueError(f"segment {self.segment_id!r}: {fault}")


def samples(source: Outcome | Rollout) -> list[TrainingSample]:
    """The training samples of an outcome or a finished rollout, nearly always one.

    They are there in the views "samples" and "full". Of a rollout that failed or was cancelled they hold what there was until
    then. A segment in which the model wrote nothing is no sample.

    Raises ValueError for a rollout that has not finished, and where ids, mask, logprobs and spans contradict each other: such
    a sample would train on the wrong tokens.
    """
    if isinstance(source, Outcome):
        return _samples(source, Rollout())
    if not source.HasField("outcome"):
        raise ValueError(f"rollout {source.uid!r} has not finished, so it has no samples yet")
    return _samples(source.outcome, source)


def _samples(outcome: Outcome, rollout: Rollout) -> list[TrainingSample]:
    segments = {segment.id: segment for segment in outcome.segments}
    written = [each for each in outcome.samples if each.response_ids or each.response_mask]
    return [_sample(each, segments.get(each.segment_id), outcome, rollout) for each in written]


def _sample(sample: Sample, segment: Segment | None, outcome: Outcome, rollout: Rollout) -> TrainingSample:
    end, reason = _end(outcome)
    spans = _spans(sample.spans) if sample.spans else None
    if segment is not None:
        _compare(sample, segment)
    return TrainingSample(
        segment_id=sample.segment_id,
        prompt_ids=list(sample.prompt_ids),
        response_ids=list(sample.response_ids),
        response_mask=list(sample.response_mask),
        logprobs=list(sample.logprobs.values) if sample.HasField("logprobs") else None,
        spans=spans,
        kind=SEGMENT_KINDS.get(sample.origin.kind, _OTHER) if sample.HasField("origin") else "",
        parent_id=sample.origin.parent_id,
        parent_tokens=sample.origin.parent_tokens,
        verified=sample.verified if sample.spans else None,
        uid=rollout.uid,
        rollout_id=rollout.spec.rollout_id,
        group_id=rollout.spec.group_id,
        end=end,
        reason=reason,
        truncated=outcome.stop.truncated and _is_last(sample, spans, outcome),
        reward=outcome.reward if outcome.HasField("reward") else None,
        scores=dict(outcome.scores),
        completion_ms=outcome.metrics.completion_ms,
        tool_ms=outcome.metrics.tool_ms,
    )


def category_of(failure: Failure) -> str:
    """The word of a failure's category, such as "tool"; of a later version's, "internal"."""
    return _CATEGORIES.get(failure.category, _CATEGORIES[FailureCategory.FAILURE_CATEGORY_INTERNAL])


def _end(outcome: Outcome) -> tuple[str, str]:
    end = outcome.WhichOneof("end")
    if end == "failure":
        return end, category_of(outcome.failure)
    if end == "cancellation":
        return end, outcome.cancellation.reason
    return end or "", outcome.stop.reason


def _is_last(sample: Sample, spans: Sequence[SampleSpan] | None, outcome: Outcome) -> bool:
    """Whether a sample ends with the rollout's last answer. Without spans the last sample is taken to."""
    if spans:
        return spans[-1].turn == outcome.metrics.turns
    return sample.segment_id == outcome.samples[-1].segment_id


def _spans(protos: Sequence[SpanProto]) -> tuple[SampleSpan, ...]:
    return tuple(
        SampleSpan(
            AUTHORS.get(proto.author, _OTHER),
            MASK_REASONS.get(proto.mask_reason, _OTHER) if proto.mask_reason else None,
            proto.turn,
            proto.start,
            proto.stop,
            proto.policy_version,
        )
        for proto in protos
    )


def _compare(sample: Sample, segment: Segment) -> None:
    written = [token for span in segment.spans for token in span.token_ids]
    if written != [*sample.prompt_ids, *sample.response_ids]:
        raise ValueError(f"segment {segment.id!r}: its spans hold other tokens than its sample")


def _fault_of_lists(sample: TrainingSample) -> str:
    """What is wrong with ids, mask and logprobs."""
    count, values = len(sample.response_ids), sample.logprobs
    if len(sample.response_mask) != count or (values is not None and len(values) != count):
        return "ids, mask and logprobs are not of the same length"
    if not count:
        return "the response is empty, so there is nothing to train on"
    if not {0, 1}.issuperset(sample.response_mask):
        return "the mask holds other values than 0 and 1"
    if values is not None and any(
        value and not trains for value, trains in zip(values, sample.response_mask, strict=True)
    ):
        return "a token that does not train has a logprob other than 0.0"
    return ""


def _fault_of_spans(sample: TrainingSample) -> str:
    """What is wrong with the spans, where they are known."""
    spans = sample.spans
    if spans is None:
        return ""
    starts = [0, *(span.stop for span in spans)]
    total = len(sample.prompt_ids) + len(sample.response_ids)
    if [span.start for span in spans] != starts[:-1] or starts != sorted(starts) or starts[-1] != total:
        return "its spans do not cover prompt and response without gaps"
    if not spans or spans[0].stop != len(sample.prompt_ids) or spans[0].reason != PROMPT:
        return "its first span is not the prompt"
    if spans[-1].author != MODEL:
        return "its last token is not the model's"
    mask = [int(span.trains) for span in spans[1:] for _ in range(span.start, span.stop)]
    return "" if mask == sample.response_mask else "its mask does not follow from its spans"

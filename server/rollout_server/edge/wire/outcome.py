"""Conversion of outcomes, metrics, segments and samples to protos."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields

from osmosis.rollout.v1 import outcome_pb2, token_pb2

from rollout_server.core.capture.report import CaptureReport
from rollout_server.core.ledger import Origin, Parting, Segment, Span
from rollout_server.core.outcome import (
    Cancellation,
    Failure,
    FailureClass,
    Metrics,
    Outcome,
    Stop,
    Warned,
    longest_share,
    sample_rewards,
    segment_rewards,
    training_verdict,
)
from rollout_server.core.segment import SamplePart
from rollout_server.core.spec import Spec
from rollout_server.core.staleness import sample_parts
from rollout_server.edge.wire import enums
from rollout_server.edge.wire.message import messages_to_proto, utf8
from rollout_server.edge.wire.spec import fields_of

_SEGMENT_KINDS = {value: kind for kind, value in enums.SEGMENT_KINDS.items()}


def outcome_to_proto(
    outcome: Outcome, spec: Spec, *, messages: bool, samples: bool, segments: bool
) -> outcome_pb2.Outcome:
    """Return the proto of the outcome of a rollout with this spec. The flags select its optional parts."""
    result, rewards = outcome.reward_result, segment_rewards(outcome)
    shown = outcome.segments if segments else ()
    proto = outcome_pb2.Outcome(
        messages=messages_to_proto(outcome.messages, typed=spec.typed) if messages else (),
        segments=[segment_to_proto(segment, rewards.get(segment.id)) for segment in shown],
        samples=_samples(outcome, spec) if samples else (),
        metrics=metrics_to_proto(outcome.metrics),
        reward=result.reward,
        scores={utf8(name): score for name, score in (result.scores or {}).items()},
        extra_json=utf8(result.extra_json),
        warnings=[_warning(warned) for warned in outcome.warnings],
        turn_rewards=[
            outcome_pb2.TurnReward(turn=each.turn, value=each.value, segment_id=each.segment_id)
            for each in outcome.turn_rewards
        ],
        reward_rule=enums.REWARD_RULES[outcome.reward_rule],
        capture=None if outcome.capture is None else capture_to_proto(outcome.capture, outcome.segments),
        policy_step=outcome.policy_step,
    )
    match outcome.end:
        case Stop(reason, truncated):
            proto.stop.CopyFrom(outcome_pb2.Stop(reason=utf8(reason), truncated=truncated))
        case Failure(category, message, turn, http_status) as failure:
            proto.failure.CopyFrom(
                outcome_pb2.Failure(
                    category=enums.CATEGORIES[category],
                    message=utf8(message),
                    turn=turn,
                    http_status=http_status,
                    failure_class=enums.FAILURE_CLASSES[failure.failure_class],
                )
            )
        case Cancellation(reason):
            proto.cancellation.CopyFrom(outcome_pb2.Cancellation(reason=utf8(reason)))
    return proto


def metrics_to_proto(metrics: Metrics) -> outcome_pb2.Metrics:
    """Return the proto of a rollout's metrics."""
    return outcome_pb2.Metrics(**fields_of(metrics))


def segment_to_proto(segment: Segment, reward: float | None) -> token_pb2.Segment:
    """Return the proto of a segment with its spans."""
    return token_pb2.Segment(
        id=segment.id,
        origin=origin_to_proto(segment.origin),
        spans=[span_to_proto(segment, span) for span in segment.spans],
        verified=segment.verified,
        role=utf8(segment.role.name),
        trainable=segment.role.trainable,
        reward=reward,
        model=segment.role.model,
    )


def origin_to_proto(origin: Origin) -> token_pb2.SegmentOrigin:
    """Return the proto of a segment's origin."""
    parting = origin.parting
    return token_pb2.SegmentOrigin(
        parent_id=origin.parent_id,
        parent_tokens=origin.parent_tokens,
        kind=enums.SEGMENT_KINDS[origin.kind],
        parting=None if parting is None else _parting_to_proto(parting),
    )


def origin_from_proto(proto: token_pb2.SegmentOrigin) -> Origin:
    """Return the core value of a segment's origin. Raises KeyError for a kind that this version does not know."""
    parting = proto.parting
    return Origin(
        _SEGMENT_KINDS[proto.kind],
        proto.parent_id,
        proto.parent_tokens,
        Parting(parting.message, parting.field, parting.expected, parting.found, parting.api, parting.client_agent)
        if proto.HasField("parting")
        else None,
    )


def capture_to_proto(report: CaptureReport, segments: Collection[Segment]) -> outcome_pb2.CaptureReport:
    """Return the proto of the counts of a rollout's calls. `segments` are those of the rollout."""
    return outcome_pb2.CaptureReport(**fields_of(report), longest_share=longest_share(segments))


def capture_from_proto(proto: outcome_pb2.CaptureReport) -> CaptureReport:
    """Return the core value of the counts of a rollout's calls."""
    return CaptureReport(**{field.name: getattr(proto, field.name) for field in fields(CaptureReport)})


def _parting_to_proto(parting: Parting) -> token_pb2.Parting:
    return token_pb2.Parting(
        message=parting.message,
        field=utf8(parting.field),
        expected=utf8(parting.expected),
        found=utf8(parting.found),
        api=utf8(parting.api),
        client_agent=utf8(parting.client_agent),
    )


def span_to_proto(segment: Segment, span: Span) -> token_pb2.Span:
    """Return the proto of a span with its token ids, logprobs (float per token, if known) and planes."""
    known = span.logprobs_known
    return token_pb2.Span(
        author=enums.AUTHORS[span.author],
        mask_reason=enums.MASK_REASONS[span.reason],
        turn=span.turn,
        token_ids=segment.ids(span.start, span.stop),
        logprobs=token_pb2.Logprobs(values=segment.logprobs(span.start, span.stop)) if known else None,
        policy_version=span.policy_version,
        planes=[token_pb2.TokenPlane(name=each.name, dtype=each.dtype, values=each.values) for each in span.planes],
        policy_step=span.policy_step,
    )


def _samples(outcome: Outcome, spec: Spec) -> list[token_pb2.Sample]:
    parts = [
        part for segment in outcome.segments for part in sample_parts(segment, spec.staleness, outcome.policy_step)
    ]
    rewards = sample_rewards(outcome, parts)
    return [_sample(outcome, part, spec.train_on, rewards.get(part)) for part in parts]


def _sample(
    outcome: Outcome, part: SamplePart, train_on: Collection[FailureClass] | None, reward: float | None
) -> token_pb2.Sample:
    segment, sample = part.segment, part.sample()
    trainable, reason = training_verdict(outcome, part, train_on)
    return token_pb2.Sample(
        segment_id=sample.segment_id,
        prompt_ids=sample.prompt_ids,
        response_ids=sample.response_ids,
        response_mask=sample.response_mask,
        logprobs=token_pb2.Logprobs(values=sample.logprobs) if sample.logprobs is not None else None,
        spans=[_sample_span(span) for span in part.spans],
        origin=origin_to_proto(segment.origin),
        verified=segment.verified,
        trainable=trainable,
        untrainable_reason=reason,
        role=utf8(segment.role.name),
        reward=reward,
        model=segment.role.model,
        part=part.index,
    )


def _sample_span(span: Span) -> token_pb2.SampleSpan:
    return token_pb2.SampleSpan(
        author=enums.AUTHORS[span.author],
        mask_reason=enums.MASK_REASONS[span.reason],
        turn=span.turn,
        start=span.start,
        stop=span.stop,
        policy_version=span.policy_version,
        policy_step=span.policy_step,
    )


def _warning(warned: Warned) -> outcome_pb2.Warning:
    return outcome_pb2.Warning(
        code=utf8(warned.code), message=utf8(warned.message), turn=warned.turn, index=warned.index
    )

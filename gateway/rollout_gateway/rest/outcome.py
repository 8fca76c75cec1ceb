"""Outcomes, metrics, segments and samples as JSON."""

import base64
from typing import Any

from osmosis.rollout.v1 import outcome_pb2, token_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb

from rollout_gateway.message_json import message_json
from rollout_gateway.rest import enums
from rollout_gateway.rest.spec import spliced

_METRICS = outcome_pb2.Metrics.DESCRIPTOR.fields


def metrics_json(metrics: outcome_pb2.Metrics) -> dict[str, Any]:
    """What a rollout used, by the contract's names; times are in milliseconds."""
    return {field.name: getattr(metrics, field.name) for field in _METRICS}


def outcome_json(outcome: outcome_pb2.Outcome, view: int) -> dict[str, Any]:
    """An outcome with as much of it as the view (`RolloutView`) holds: how it ended stands first, in one object with the rest."""
    found = _end(outcome)
    found["reward"] = outcome.reward if outcome.HasField("reward") else None
    found["scores"] = dict(sorted(outcome.scores.items()))
    found["extra"] = spliced(outcome.extra_json)
    found["warnings"] = [_warning(warning) for warning in outcome.warnings]
    found["metrics"] = metrics_json(outcome.metrics)
    if view >= pb.ROLLOUT_VIEW_MESSAGES:
        found["messages"] = [message_json(message) for message in outcome.messages]
    if view >= pb.ROLLOUT_VIEW_SAMPLES:
        found["samples"] = [_sample(sample) for sample in outcome.samples]
    if view >= pb.ROLLOUT_VIEW_FULL:
        found["segments"] = [_segment(segment) for segment in outcome.segments]
    return found


def _end(outcome: outcome_pb2.Outcome) -> dict[str, Any]:
    if outcome.HasField("stop"):
        return {"end": "stop", "reason": outcome.stop.reason, "truncated": outcome.stop.truncated}
    if outcome.HasField("cancellation"):
        return {"end": "cancellation", "reason": outcome.cancellation.reason}
    failure = outcome.failure
    return {
        "end": "failure",
        # As the contract asks of readers of a category that they do not know.
        "category": enums.CATEGORIES.get(failure.category, enums.CATEGORIES[outcome_pb2.FAILURE_CATEGORY_INTERNAL]),
        "message": failure.message,
        "turn": failure.turn,
        "http_status": failure.http_status if failure.HasField("http_status") else None,
    }


def _warning(warning: outcome_pb2.Warning) -> dict[str, Any]:
    return {
        "code": warning.code,
        "message": warning.message,
        "turn": warning.turn,
        "index": warning.index if warning.HasField("index") else None,
    }


def _sample(sample: token_pb2.Sample) -> dict[str, Any]:
    return {
        "segment_id": sample.segment_id,
        "prompt_ids": list(sample.prompt_ids),
        "response_ids": list(sample.response_ids),
        "response_mask": list(sample.response_mask),
        "logprobs": list(sample.logprobs.values) if sample.HasField("logprobs") else None,
        "spans": [_sample_span(span) for span in sample.spans],
        "origin": origin_json(sample.origin),
        "verified": sample.verified,
    }


def _sample_span(span: token_pb2.SampleSpan) -> dict[str, Any]:
    return _written(span) | {"start": span.start, "stop": span.stop, "policy_version": span.policy_version}


def _segment(segment: token_pb2.Segment) -> dict[str, Any]:
    return {
        "id": segment.id,
        "origin": origin_json(segment.origin),
        "spans": [span_json(span) for span in segment.spans],
        "verified": segment.verified,
    }


def origin_json(origin: token_pb2.SegmentOrigin) -> dict[str, Any]:
    """Where a segment comes from."""
    return {
        "parent_id": origin.parent_id,
        "parent_tokens": origin.parent_tokens,
        "kind": enums.SEGMENT_KINDS.get(origin.kind, enums.OTHER),
    }


def span_json(span: token_pb2.Span) -> dict[str, Any]:
    """A run of tokens with one author; `mask_reason` is null exactly where it trains, `logprobs` where they are unknown."""
    found = _written(span) | {
        "token_ids": list(span.token_ids),
        "logprobs": list(span.logprobs.values) if span.HasField("logprobs") else None,
        "policy_version": span.policy_version,
    }
    if span.planes:
        found["planes"] = [_plane(plane) for plane in span.planes]
    return found


def _written(span: token_pb2.Span | token_pb2.SampleSpan) -> dict[str, Any]:
    """By whom, why masked, in which turn."""
    return {
        "author": enums.AUTHORS.get(span.author, enums.OTHER),
        "mask_reason": enums.MASK_REASONS.get(span.mask_reason, enums.OTHER) if span.mask_reason else None,
        "turn": span.turn,
    }


def _plane(plane: token_pb2.TokenPlane) -> dict[str, Any]:
    return {"name": plane.name, "dtype": plane.dtype, "values": base64.b64encode(plane.values).decode()}

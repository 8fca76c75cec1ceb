"""Conversion of the REST API's JSON to protobuf messages, limited to the fields that the views show."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from google.protobuf.descriptor import EnumDescriptor
from osmosis.rollout.v1 import message_pb2, outcome_pb2, rollout_service_pb2, spec_pb2, token_pb2
from rollout_client.proto_fields import enum_values

Fields: TypeAlias = Mapping[str, Any]


def is_rest_json(value: Fields) -> bool:
    """Return whether an object is a rollout of `GET /v1/rollouts/{uid}` and not the JSON form of a protobuf message."""
    outcome = value.get("outcome")
    states = list(enum_values(rollout_service_pb2.RolloutState.DESCRIPTOR))
    return value.get("state") in states or (isinstance(outcome, dict) and isinstance(outcome.get("end"), str))


def rollout_of(value: Fields) -> rollout_service_pb2.Rollout:
    """Return the rollout as a protobuf message.

    Raises ValueError, KeyError, TypeError, AttributeError or OverflowError for JSON of another shape.
    """
    spec = value.get("spec") or {}
    found = rollout_service_pb2.Rollout(
        uid=value["uid"],
        state=_number(rollout_service_pb2.RolloutState.DESCRIPTOR, value.get("state")),
        caller=value.get("caller", ""),
        spec=spec_pb2.RolloutSpec(
            rollout_id=spec.get("rollout_id", ""),
            group_id=spec.get("group_id", ""),
            agent=spec.get("agent", ""),
            tokenizer=_tokenizer(spec["tokenizer"]) if spec.get("tokenizer") else None,
        ),
    )
    if value.get("outcome") is not None:
        found.outcome.CopyFrom(_outcome(value["outcome"]))
    return found


def _tokenizer(value: Fields) -> spec_pb2.Tokenizer:
    return spec_pb2.Tokenizer(name=value["name"], revision=value.get("revision", ""))


def _outcome(value: Fields) -> outcome_pb2.Outcome:
    found = outcome_pb2.Outcome(
        messages=[message_pb2.Message(json=json.dumps(message)) for message in value.get("messages", ())],
        segments=[_segment(segment) for segment in value.get("segments", ())],
        samples=[_sample(sample) for sample in value.get("samples", ())],
        metrics=outcome_pb2.Metrics(**value.get("metrics", {})),
        reward=value.get("reward"),
        scores=value.get("scores", {}),
        warnings=[outcome_pb2.Warning(**warning) for warning in value.get("warnings", ())],
        capture=outcome_pb2.CaptureReport(**value["capture"]) if value.get("capture") else None,
        policy_step=value.get("policy_step"),
    )
    match value["end"]:
        case "stop":
            found.stop.reason, found.stop.truncated = value["reason"], value["truncated"]
        case "cancellation":
            found.cancellation.reason = value["reason"]
        case "failure":
            found.failure.category = _number(outcome_pb2.FailureCategory.DESCRIPTOR, value["category"])
            if "failure_class" in value:
                found.failure.failure_class = _number(outcome_pb2.FailureClass.DESCRIPTOR, value["failure_class"])
            found.failure.message, found.failure.turn = value["message"], value["turn"]
            if value.get("http_status") is not None:
                found.failure.http_status = value["http_status"]
        case other:
            raise ValueError(f"a rollout cannot end as {other!r}")
    return found


def _sample(value: Fields) -> token_pb2.Sample:
    return token_pb2.Sample(
        segment_id=value["segment_id"],
        prompt_ids=value["prompt_ids"],
        response_ids=value["response_ids"],
        response_mask=bytes(value["response_mask"]),
        logprobs=_logprobs(value["logprobs"]),
        spans=[_sample_span(span) for span in value["spans"]],
        origin=_origin(value["origin"]),
        verified=value["verified"],
        trainable=value.get("trainable"),
        untrainable_reason=value.get("untrainable_reason", ""),
        part=value.get("part", 0),
    )


def _sample_span(value: Fields) -> token_pb2.SampleSpan:
    return token_pb2.SampleSpan(
        author=_number(token_pb2.Author.DESCRIPTOR, value["author"]),
        mask_reason=_number(token_pb2.MaskReason.DESCRIPTOR, value["mask_reason"]),
        turn=value["turn"],
        start=value["start"],
        stop=value["stop"],
        policy_version=value["policy_version"],
        policy_step=value.get("policy_step"),
    )


def _origin(value: Fields) -> token_pb2.SegmentOrigin:
    return token_pb2.SegmentOrigin(
        parent_id=value["parent_id"],
        parent_tokens=value["parent_tokens"],
        kind=_number(token_pb2.SegmentKind.DESCRIPTOR, value["kind"]),
        parting=token_pb2.Parting(**value["parting"]) if value.get("parting") else None,
    )


def _segment(value: Fields) -> token_pb2.Segment:
    return token_pb2.Segment(
        id=value["id"],
        origin=_origin(value["origin"]),
        spans=[_span(span) for span in value["spans"]],
        verified=value["verified"],
    )


def _span(value: Fields) -> token_pb2.Span:
    return token_pb2.Span(
        author=_number(token_pb2.Author.DESCRIPTOR, value["author"]),
        mask_reason=_number(token_pb2.MaskReason.DESCRIPTOR, value["mask_reason"]),
        turn=value["turn"],
        token_ids=value["token_ids"],
        logprobs=_logprobs(value["logprobs"]),
        policy_version=value["policy_version"],
        policy_step=value.get("policy_step"),
        planes=[token_pb2.TokenPlane(name=plane["name"], dtype=plane["dtype"]) for plane in value.get("planes", ())],
    )


def _logprobs(values: Sequence[float] | None) -> token_pb2.Logprobs | None:
    return None if values is None else token_pb2.Logprobs(values=values)


# Returns Any because the generated code has a separate type for each enum.
def _number(enum: EnumDescriptor, word: str | None) -> Any:
    """Return the enum number of a word; 0 for None and for an unknown word, such as one of a later version."""
    if not isinstance(word, str | None):
        raise TypeError(f"{word!r} is not an enum name")
    return enum_values(enum).get(word or "", 0)

"""The rollout of its training samples, of which files are exported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from osmosis.rollout.v1 import outcome_pb2, spec_pb2, token_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_client import SampleSpan, TrainingSample, samples
from rollout_client.export import from_dict

from rollout_server.archive.archive import Recording
from rollout_server.evaluation.row_rollout import number_of, set_end
from rollout_server.inspection.rest_json import rollout_of, strict_json


def rollout_of_samples(lines: Sequence[bytes]) -> Recording:
    """Return the rollout of its training samples, given as lines of JSON. It has their tokens, but no messages."""
    found = _samples([strict_json(line) for line in lines])
    first = found[0]
    outcome = outcome_pb2.Outcome(
        segments=[_segment(sample) for sample in found], reward=first.reward, scores=first.scores
    )
    for reward in first.turn_rewards:
        outcome.turn_rewards.add(turn=reward.turn, value=reward.value)
    set_end(outcome, first.end or "stop", first.reason, "", first.failure_class)
    outcome.metrics.generated_tokens = sum(sum(sample.response_mask) for sample in found)
    outcome.metrics.turns = max((span.turn for sample in found for span in sample.spans or ()), default=0)
    spec = spec_pb2.RolloutSpec(rollout_id=first.rollout_id, group_id=first.group_id)
    return Recording(
        pb.Rollout(uid=first.uid, spec=spec, state=pb.ROLLOUT_STATE_FINISHED, outcome=outcome, metrics=outcome.metrics)
    )


def _samples(values: Sequence[dict[str, Any]]) -> Sequence[TrainingSample]:
    """Return the samples of a file of this project's client, or of an export of the page."""
    if "origin" not in values[0]:
        return [from_dict(value) for value in values]
    outcome = {"end": "stop", "reason": "", "samples": values}
    return samples(rollout_of({"uid": "samples", "state": "finished", "outcome": outcome}))


def _segment(sample: TrainingSample) -> token_pb2.Segment:
    ids, prompt = [*sample.prompt_ids, *sample.response_ids], len(sample.prompt_ids)
    origin = token_pb2.SegmentOrigin(
        parent_id=sample.parent_id,
        parent_tokens=sample.parent_tokens,
        kind=number_of(token_pb2.SegmentKind.DESCRIPTOR, sample.kind or "main"),
    )
    found = token_pb2.Segment(
        id=f"{sample.segment_id}.{sample.part}" if sample.part else sample.segment_id,
        origin=origin,
        verified=bool(sample.verified),
        role=sample.role,
        trainable=sample.trainable,
        model=sample.model,
    )
    for span in sample.spans or _spans(sample):
        proto = found.spans.add(
            author=number_of(token_pb2.Author.DESCRIPTOR, span.author),
            mask_reason=number_of(token_pb2.MaskReason.DESCRIPTOR, span.reason or ""),
            turn=span.turn,
            token_ids=ids[span.start : span.stop],
            policy_version=span.policy_version,
            policy_step=span.policy_step,
        )
        if sample.logprobs is not None and span.author == "model":
            proto.logprobs.values.extend(sample.logprobs[span.start - prompt : span.stop - prompt])
    return found


def _spans(sample: TrainingSample) -> Iterator[SampleSpan]:
    """Yield spans for a sample without them: its mask tells who wrote a token, but not in which turn."""
    stop = len(sample.prompt_ids)
    yield SampleSpan("other", "prompt", 1, 0, stop)
    for trains, run in groupby(sample.response_mask):
        start, stop = stop, stop + len([*run])
        yield SampleSpan("model" if trains else "other", None if trains else "environment", 1, start, stop)

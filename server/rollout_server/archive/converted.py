"""Rollouts from what is left of them: results of evaluations, and training samples."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from osmosis.rollout.v1 import message_pb2, outcome_pb2, spec_pb2, token_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_client import SampleSpan, TrainingSample
from rollout_client.export import from_dict
from rollout_client.proto_fields import enum_values

from rollout_server.archive.archive import Recording
from rollout_server.authoring.rollout_result import REFUSED
from rollout_server.evaluation.row_result import RowResult

_FINISHED = pb.ROLLOUT_STATE_FINISHED


def rollout_of_result(result: RowResult) -> pb.Rollout:
    """Return the rollout of a result: its conversation and figures, without tokens. Facts of its row become labels."""
    facts = {**({} if result.ground_truth is None else {"ground truth": result.ground_truth}), **result.metadata}
    labels = {"row": str(result.row), "repetition": str(result.repeat)}
    outcome = outcome_pb2.Outcome(
        messages=_messages(result.messages or result.prompt),
        metrics=outcome_pb2.Metrics(
            total_ms=result.ms.total,
            completion_ms=result.ms.completions,
            tool_ms=result.ms.tools,
            turns=result.turns,
            tool_calls=result.tool_calls,
            tool_failures=sum(result.tool_errors.values()),
            generated_tokens=result.tokens.generated,
            prompt_tokens=result.tokens.prompt,
            max_context_tokens=result.tokens.longest,
        ),
        reward=result.reward,
        scores=result.scores,
        warnings=[_warning(text) for text in result.warnings],
    )
    _set_end(outcome, result.end, result.reason, result.message, result.failure_class)
    spec = spec_pb2.RolloutSpec(
        rollout_id=result.rollout_id,
        group_id=f"row-{result.row}",
        group_index=result.repeat - 1,
        messages=_messages(result.prompt),
        labels={**{str(name): _text(value) for name, value in facts.items()}, **labels},
    )
    uid = result.uid or f"row-{result.row}-{result.repeat}"
    return pb.Rollout(uid=uid, spec=spec, state=_FINISHED, outcome=outcome, metrics=outcome.metrics)


def rollout_of_samples(lines: Sequence[bytes]) -> Recording:
    """Return the rollout of its training samples, given as lines of JSON. It has their tokens, but no messages."""
    samples = [from_dict(json.loads(line)) for line in lines]
    first = samples[0]
    outcome = outcome_pb2.Outcome(
        segments=[_segment(sample) for sample in samples], reward=first.reward, scores=first.scores
    )
    for reward in first.turn_rewards:
        outcome.turn_rewards.add(turn=reward.turn, value=reward.value)
    _set_end(outcome, first.end or "stop", first.reason, "", first.failure_class)
    outcome.metrics.generated_tokens = sum(sum(sample.response_mask) for sample in samples)
    outcome.metrics.turns = max((span.turn for sample in samples for span in sample.spans or ()), default=0)
    spec = spec_pb2.RolloutSpec(rollout_id=first.rollout_id, group_id=first.group_id)
    return Recording(pb.Rollout(uid=first.uid, spec=spec, state=_FINISHED, outcome=outcome, metrics=outcome.metrics))


def _segment(sample: TrainingSample) -> token_pb2.Segment:
    ids, prompt = [*sample.prompt_ids, *sample.response_ids], len(sample.prompt_ids)
    origin = token_pb2.SegmentOrigin(
        parent_id=sample.parent_id,
        parent_tokens=sample.parent_tokens,
        kind=_number(token_pb2.SegmentKind.DESCRIPTOR, sample.kind or "main"),
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
            author=_number(token_pb2.Author.DESCRIPTOR, span.author),
            mask_reason=_number(token_pb2.MaskReason.DESCRIPTOR, span.reason or ""),
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
        yield SampleSpan(*(("model", None) if trains else ("other", "environment")), 1, start, stop)


def _set_end(outcome: outcome_pb2.Outcome, end: str, reason: str, message: str, failure_class: str) -> None:
    match end:
        case "stop":
            outcome.stop.reason = reason
        case "cancellation":
            outcome.cancellation.reason = reason
        case _:
            outcome.failure.category = _number(outcome_pb2.FailureCategory.DESCRIPTOR, reason)
            outcome.failure.failure_class = _number(outcome_pb2.FailureClass.DESCRIPTOR, failure_class)
            outcome.failure.message = f"refused: {message}" if end == REFUSED else message
            outcome.failure.SetInParent()


def _warning(text: str) -> outcome_pb2.Warning:
    code, _, message = text.partition(": ")
    return outcome_pb2.Warning(code=code, message=message)


def _messages(found: Sequence[Any]) -> list[message_pb2.Message]:
    # What `bounded` has left of a list that is too long is a text.
    shown = (each if isinstance(each, dict) else {"role": "…", "content": str(each)} for each in found)
    return [message_pb2.Message(json=json.dumps(each)) for each in shown]


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# Returns Any because the generated code has a separate type for each enum.
def _number(enum: Any, word: str) -> Any:
    return enum_values(enum).get(word, 0)

"""OpenEnv's `TrainingTrace` of a rollout: one turn per completion, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, Final

from openenv.core.harness import TrainingTrace, TrainingTurn

from rollout_client.chat_messages import messages
from rollout_client.export.json_lines import trained_logprobs, trained_mask
from rollout_client.samples import MODEL, SampleSpan, TrainingSample
from rollout_client.trainer.results import Finished

_LINEAR: Final = frozenset({"main", "drift", "gap"})
"""Kinds of segments that continue one conversation."""


def training_trace(source: Finished | TrainingSample) -> TrainingTrace:
    """Convert a finished rollout, or one of its samples, to OpenEnv's trace: one turn per completion.

    The prompt of a turn is everything in front of its completion, token for token. Each generated token is in exactly one
    completion. Samples that are not trainable are included with mask 0, those of further models only if given alone. The turns of a
    sample are in order and not mixed with those of others. The trace of a rollout has its messages: of each turn if it is one
    conversation, otherwise all in the last turn.

    Raises:
        ValueError: a trainable sample lacks logprobs or spans, the trainer refused the samples (`mismatch`), or OpenEnv
            refuses a turn, for example because a logprob is positive.
    """
    if isinstance(source, TrainingSample):
        return TrainingTrace(turns=[turn for _, turn in _turns(source)])
    if source.mismatch is not None:
        raise ValueError(f"rollout {source.uid!r} has no trace: {source.mismatch}")
    samples = sorted((*source.own, *source.own_untrainable), key=_last_completion)
    numbered = [each for sample in samples for each in _turns(sample)]
    _add_messages(numbered, source, linear=all(each.kind in _LINEAR for each in samples))
    return TrainingTrace(turns=[turn for _, turn in numbered])


def _last_completion(sample: TrainingSample) -> tuple[int, int]:
    return (sample.spans[-1].turn, sample.spans[-1].stop) if sample.spans else (0, 0)


def _turns(sample: TrainingSample) -> Iterator[tuple[int, TrainingTurn]]:
    """Yield the completions of a sample, each with the number of its turn."""
    where = f"rollout {sample.uid!r}, segment {sample.segment_id!r}"
    if sample.spans is None:
        raise ValueError(
            f"{where}: the sample has no spans, so its completions are unknown; get it from a newer server"
        )
    logprobs = trained_logprobs(sample)
    if logprobs is None:
        if sample.trainable:
            raise ValueError(
                f"{where}: a completion has no logprobs, and OpenEnv needs one per token; request them from the engine"
            )
        logprobs = [0.0] * len(sample.response_ids)
    ids, mask, first = [*sample.prompt_ids, *sample.response_ids], trained_mask(sample), len(sample.prompt_ids)
    for turn, found in groupby(sample.spans, key=lambda span: span.turn if span.author == MODEL else None):
        if turn is None:
            continue
        spans = list(found)
        start, stop = spans[0].start, spans[-1].stop
        yield (
            turn,
            TrainingTurn(
                node_id=f"{sample.uid}/{sample.segment_id}/{start}",
                prompt_token_ids=ids[:start],
                completion_token_ids=ids[start:stop],
                per_token_logps=logprobs[start - first : stop - first],
                loss_mask=[0] * start + mask[start - first : stop - first],
                metadata=_metadata(sample, turn, spans),
            ),
        )


def _metadata(sample: TrainingSample, turn: int, spans: list[SampleSpan]) -> dict[str, Any]:
    return {
        "rollout_uid": sample.uid,
        "group_id": sample.group_id,
        "segment_id": sample.segment_id,
        "turn": turn,
        "role": sample.role,
        "model": sample.model,
        "policy_versions": [span.policy_version for span in spans],
        "policy_steps": [span.policy_step for span in spans],
        "untrainable_reason": sample.untrainable_reason,
    }


def _add_messages(numbered: list[tuple[int, TrainingTurn]], finished: Finished, *, linear: bool) -> None:
    """Set `request` and `response`: of each turn if every completion has one message of the conversation, else of the last turn."""
    if not numbered:
        return
    conversation = finished.messages
    replies, given = _replies(conversation), len(_replies(messages(finished.rollout.spec)))
    if linear and len(replies) - given == finished.rollout.outcome.metrics.turns:
        for number, turn in numbered:
            _set_messages(turn, conversation, replies[given + number - 1])
    elif replies:
        _set_messages(numbered[-1][1], conversation, replies[-1])


def _replies(conversation: list[dict[str, Any]]) -> list[int]:
    return [index for index, each in enumerate(conversation) if each.get("role") == "assistant"]


def _set_messages(turn: TrainingTurn, conversation: list[dict[str, Any]], reply: int) -> None:
    turn.request = {"messages": conversation[:reply]}
    turn.response = {"choices": [{"message": conversation[reply]}]}

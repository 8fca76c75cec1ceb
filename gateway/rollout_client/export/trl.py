"""Return value of a rollout function for TRL: `GRPOTrainer(rollout_func=...)` (trl/trainer/grpo_trainer.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypedDict

from rollout_client.export.json_lines import trained_logprobs, trained_mask
from rollout_client.samples import TrainingSample

if TYPE_CHECKING:
    from rollout_client.trainer.results import Finished


class TrlOutput(TypedDict):
    """Dictionary that a `rollout_func` returns: lists with one row per sample or rollout.

    Keys:
        prompt_ids: token ids (int) of each prompt.
        completion_ids: token ids (int) of each response, environment tokens included.
        logprobs: natural logarithms (float), one per id in `completion_ids`, 0.0 where `env_mask` is 0. None: some are unknown.
        env_mask: one int per id in `completion_ids`: 1 for a generated token that trains, otherwise 0. TRL applies it as
            `tool_mask`, but only if the GRPOTrainer has no tools. All 0 for a sample that is not trainable.
        rollout_untrainable: why a row does not train, such as "failure_engine"; empty if it does. "mismatch": the trainer refused
            the rollout's samples.
        rollout_error: text of a rollout's failure; empty for others and for bare samples.
        rollout_uid, rollout_end, rollout_truncated, rollout_reward, rollout_role, rollout_model, rollout_turn_scores: `uid`, `end`,
            `truncated`, `reward`, `role`, `model` and `turn_scores` of each sample. TRL passes these keys to reward functions as
            keyword arguments.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]] | None
    env_mask: list[list[int]]
    rollout_untrainable: list[str]
    rollout_error: list[str]
    rollout_uid: list[str]
    rollout_end: list[str]
    rollout_truncated: list[bool]
    rollout_reward: list[float | None]
    rollout_role: list[str]
    rollout_model: list[str]
    rollout_turn_scores: list[list[float]]


def to_trl(samples: Iterable[TrainingSample | Finished], *, end_id: int | None = None) -> TrlOutput:
    """Convert samples, or finished rollouts of a `Trainer`, to the return value of a `rollout_func`.

        return to_trl([rollout for group in groups for rollout in group.rollouts], end_id=end)  # exactly one row per rollout

    The row of a rollout is its `primary` sample. If it has none, the row is the first sample that no further model generated, with
    mask 0 throughout. Without any, prompt and completion of the row are the single token `end_id`, with mask 0, and its reward is
    None.

    A sample that is not trainable keeps its row, because TRL assigns rows to groups by position, but its mask is 0 throughout. Its
    reward is None unless the agent gave one: a reward function should return None for it, not 0.

    A sample of a rollout that failed in a class of `train_on` is trainable, but its reward is None: TRL leaves it out of the
    group's mean, and its advantage is 0. So request rollouts for TRL with `train_on=[]`.

    `logprobs` is None for all rows if one trainable sample has none, because TRL has no value for a row without logprobs.

    Args:
        samples: exactly one sample or rollout per prompt, in the order of the prompts that TRL passed.
        end_id: id of the stop token. Required if a rollout may have no samples.

    Raises:
        ValueError: a rollout has no samples, and `end_id` is not given. TRL fails if a row is missing, without saying so.
        ValueError: two samples belong to one rollout. TRL assigns rows to groups by position, so an additional row would move
            all later rows into the groups of other prompts.
    """
    given = list(samples)
    rows = [each if isinstance(each, TrainingSample) else _sample_of(each, end_id) for each in given]
    counted = Counter(row.uid for row in rows if row.uid)
    uid, count = next(iter(counted.most_common(1)), ("", 0))
    if count > 1:
        raise ValueError(f"rollout {uid!r} has {count} samples, but TRL takes one row per prompt; choose one of them")
    # A sample that is not trainable has mask 0 throughout: if its logprobs are unknown, the other rows keep theirs.
    unknown = [row for row in rows if row.logprobs is None]
    lacking = any(row.trainable for row in unknown) or 0 < len(unknown) == len(rows)
    return TrlOutput(
        prompt_ids=[list(row.prompt_ids) for row in rows],
        completion_ids=[list(row.response_ids) for row in rows],
        logprobs=None if lacking else [trained_logprobs(row) or [0.0] * len(row.response_ids) for row in rows],
        env_mask=[trained_mask(row) for row in rows],
        rollout_untrainable=[row.untrainable_reason for row in rows],
        rollout_error=["" if isinstance(each, TrainingSample) else each.error for each in given],
        rollout_uid=[row.uid for row in rows],
        rollout_end=[row.end for row in rows],
        rollout_truncated=[row.truncated for row in rows],
        rollout_reward=[row.reward for row in rows],
        rollout_role=[row.role for row in rows],
        rollout_model=[row.model for row in rows],
        rollout_turn_scores=[row.turn_scores for row in rows],
    )


def _sample_of(rollout: Finished, end_id: int | None) -> TrainingSample:
    """Return the one sample that stands for a rollout."""
    own = [rollout.primary] if rollout.primary else rollout.own_untrainable
    if own:
        return own[0]
    if end_id is None:
        raise ValueError(f"rollout {rollout.uid!r} has no samples, so its row needs a token; give to_trl an end_id")
    failed = f"failure_{rollout.failure_class}" if rollout.end == "failure" else rollout.failure_class
    return TrainingSample(
        segment_id="",
        prompt_ids=[end_id],
        response_ids=[end_id],
        response_mask=[0],
        logprobs=[0.0],
        uid=rollout.uid,
        group_id=rollout.group_id,
        end=rollout.end,
        failure_class=rollout.failure_class,
        trainable=False,
        untrainable_reason="mismatch" if rollout.mismatch else failed or "no_trained_tokens",
    )

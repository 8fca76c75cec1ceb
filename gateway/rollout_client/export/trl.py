"""What a rollout function of TRL returns: `GRPOTrainer(rollout_func=...)` (trl/trainer/grpo_trainer.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypedDict

from rollout_client.samples import TrainingSample


class TrlOutput(TypedDict):
    """One row for each sample; a row's `completion_ids`, `logprobs` (natural logarithms) and `env_mask` are equally long.

    `env_mask` is 1 where the model wrote a token that trains; TRL counts it as `tool_mask`, and only without tools of its own.
    The keys after it reach the reward functions as keywords.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]] | None
    env_mask: list[list[int]]
    rollout_uid: list[str]
    rollout_end: list[str]
    rollout_truncated: list[bool]
    rollout_reward: list[float | None]


def to_trl(samples: Iterable[TrainingSample]) -> TrlOutput:
    """Samples in the order in which TRL gave their prompts, one for each.

    `logprobs` is None for all of them where one has none: TRL has no word for a row without.

    Raises ValueError for several samples of one rollout: TRL compares rows by their place, so each further one would move
    the rows after it into groups of other prompts.
    """
    rows = list(samples)
    counted = Counter(row.uid for row in rows if row.uid)
    uid, count = next(iter(counted.most_common(1)), ("", 0))
    if count > 1:
        raise ValueError(f"rollout {uid!r} has {count} samples here, and TRL takes one row for each prompt: choose one")
    known = [list(row.logprobs) for row in rows if row.logprobs is not None]
    return TrlOutput(
        prompt_ids=[list(row.prompt_ids) for row in rows],
        completion_ids=[list(row.response_ids) for row in rows],
        logprobs=known if len(known) == len(rows) else None,
        env_mask=[list(row.response_mask) for row in rows],
        rollout_uid=[row.uid for row in rows],
        rollout_end=[row.end for row in rows],
        rollout_truncated=[row.truncated for row in rows],
        rollout_reward=[row.reward for row in rows],
    )

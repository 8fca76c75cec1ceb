"""Fields of verl's `AgentLoopOutput`, which the `run` of an agent loop returns (verl/experimental/agent_loop/agent_loop.py)."""

from __future__ import annotations

from itertools import groupby
from typing import Any, TypedDict

from rollout_client.export.json_lines import to_dict, trained_logprobs, trained_mask
from rollout_client.samples import ENVIRONMENT, MODEL, TrainingSample


class VerlMetrics(TypedDict):
    """The fields of verl's `AgentLoopMetrics` that a sample provides, in seconds (float)."""

    generate_sequences: float
    tool_calls: float


class VerlOutput(TypedDict):
    """Keyword arguments of `AgentLoopOutput`. Below, T is the number of response tokens.

    Keys:
        prompt_ids: token ids (int) of the prompt.
        response_ids: T token ids (int): completions and environment tokens.
        response_mask: T values (int): 1 for a generated token that trains, otherwise 0. All 0 if the sample is not trainable.
        response_logprobs: T natural logarithms (float), 0.0 where the mask is 0. None: not known.
        reward_score: reward of the sample; verl puts it on the last token. None: verl computes its own.
        num_turns: number of chat turns as verl counts them: prompt, completions, and environment messages in between.
        metrics: times of the rollout in seconds.
        extra_fields: "turn_scores", "min_global_steps" and "max_global_steps" are verl's own columns, here with `turn_scores` and
            `policy_steps` of the sample; None: no step is known. All other fields of the sample are under the key "rollout_sample".
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None
    reward_score: float | None
    num_turns: int
    metrics: VerlMetrics
    extra_fields: dict[str, Any]


def to_verl(sample: TrainingSample) -> VerlOutput:
    """Convert a sample to keyword arguments of verl's `AgentLoopOutput`.

        return AgentLoopOutput(**to_verl(sample))

    verl needs an output for every prompt, so a sample that is not trainable has one too, with mask 0 throughout. To leave such
    samples out, and count why, use `only_trainable` first.

    Ids are not truncated to verl's configured lengths. If a rollout has several samples, each has the times of the whole rollout.
    """
    # One key for all other fields: verl turns each key into a batch column and replaces its own column of the same name. A key
    # "uid" would replace verl's, which identifies the GRPO group.
    apart = ("prompt_ids", "response_ids", "response_mask", "logprobs", "reward", "completion_ms", "tool_ms")
    lowest, highest = sample.policy_steps or (None, None)
    return VerlOutput(
        prompt_ids=list(sample.prompt_ids),
        response_ids=list(sample.response_ids),
        response_mask=trained_mask(sample),
        response_logprobs=trained_logprobs(sample),
        reward_score=sample.reward,
        num_turns=_turns(sample),
        metrics=VerlMetrics(generate_sequences=sample.completion_ms / 1000, tool_calls=sample.tool_ms / 1000),
        extra_fields={
            "turn_scores": sample.turn_scores,
            "min_global_steps": lowest,
            "max_global_steps": highest,
            "rollout_sample": {key: value for key, value in to_dict(sample).items() if key not in apart},
        },
    )


def _turns(sample: TrainingSample) -> int:
    """Count chat turns as verl does: the prompt, each completion, and each block of environment messages in between."""
    if sample.spans is None:
        return 1 + sum(1 for _ in groupby(sample.response_mask))
    completions = {span.turn for span in sample.spans if span.author == MODEL}
    environment = {span.turn for span in sample.spans if span.reason == ENVIRONMENT}
    return 1 + len(completions) + len(environment)

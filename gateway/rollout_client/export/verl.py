"""The fields of verl's `AgentLoopOutput` (verl/experimental/agent_loop/agent_loop.py), which an agent loop's `run` returns."""

from __future__ import annotations

from itertools import groupby
from typing import Any, TypedDict

from rollout_client.export.json_lines import to_dict
from rollout_client.samples import ENVIRONMENT, MODEL, TrainingSample


class VerlMetrics(TypedDict):
    """The fields of verl's `AgentLoopMetrics` that are known here, in seconds."""

    generate_sequences: float
    tool_calls: float


class VerlOutput(TypedDict):
    """Keyword arguments of `AgentLoopOutput`; the ids, mask and logprobs (natural logarithms) of the response are equally long."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None
    reward_score: float | None
    num_turns: int
    metrics: VerlMetrics
    extra_fields: dict[str, Any]


def to_verl(sample: TrainingSample) -> VerlOutput:
    """A sample for `AgentLoopOutput(**to_verl(sample))`.

    Nothing is cut to the configured lengths. Without a reward verl computes its own. All else that is known of the sample stands
    under one key of `extra_fields`, "rollout_sample": verl makes a column of each key, over one of its own where the names are
    the same, and its `uid` says which samples are a group. Of a rollout with several samples each carries the whole rollout's
    reward and times.
    """
    apart = ("prompt_ids", "response_ids", "response_mask", "logprobs", "reward", "completion_ms", "tool_ms")
    return VerlOutput(
        prompt_ids=list(sample.prompt_ids),
        response_ids=list(sample.response_ids),
        response_mask=list(sample.response_mask),
        response_logprobs=None if sample.logprobs is None else list(sample.logprobs),
        reward_score=sample.reward,
        num_turns=_turns(sample),
        metrics=VerlMetrics(generate_sequences=sample.completion_ms / 1000, tool_calls=sample.tool_ms / 1000),
        extra_fields={"rollout_sample": {key: value for key, value in to_dict(sample).items() if key not in apart}},
    )


def _turns(sample: TrainingSample) -> int:
    """verl's count of chat turns: the prompt, each answer, and each time that others spoke in between."""
    if sample.spans is None:
        return 1 + sum(1 for _ in groupby(sample.response_mask))
    answers = {span.turn for span in sample.spans if span.author == MODEL}
    between = {span.turn for span in sample.spans if span.reason == ENVIRONMENT}
    return 1 + len(answers) + len(between)

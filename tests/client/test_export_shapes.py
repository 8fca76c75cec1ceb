"""Samples in the formats of trainers, and as dictionaries."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_client import TrainingSample, samples
from rollout_client.export import from_dict, to_dict, to_trl, to_verl

from tests.support.random_rollouts import outcome_of, rollouts, span

TURNS = (span("prompt", 2), span("model", 2), span("environment", 3, turn=2), span("model", 2, turn=2))
# From verl/experimental/agent_loop/agent_loop.py. Fields that are missing here have defaults there.
VERL_FIELDS = {
    "prompt_ids",
    "response_ids",
    "response_mask",
    "response_logprobs",
    "routed_experts",
    "multi_modal_data",
    "reward_score",
    "num_turns",
    "metrics",
    "extra_fields",
    "mm_processor_kwargs",
    "mm_processor_output",
}
VERL_METRICS = {"generate_sequences", "tool_calls", "compute_score", "num_preempted"}


def sample(uid: str = "u", **changes: Any) -> TrainingSample:
    (made,) = samples(outcome_of(*TURNS))
    return dataclasses.replace(made, uid=uid, **changes)


@settings(max_examples=50)
@given(rollouts())
def test_a_dictionary_is_the_sample_and_json_keeps_it(rollout: pb.Rollout) -> None:
    for each in samples(rollout):
        told = json.loads(json.dumps(to_dict(each), allow_nan=False))
        assert told == to_dict(each)
        assert from_dict(told) == each
        assert set(told) == {field.name for field in dataclasses.fields(each)}


def test_a_dictionary_shares_nothing_with_its_sample() -> None:
    kept = sample()
    told = to_dict(kept)
    told["response_mask"][0] = 0
    told["logprobs"].clear()
    assert kept == sample()


def test_what_is_not_known_may_be_left_out() -> None:
    least = {"segment_id": "0", "prompt_ids": [1], "response_ids": [2], "response_mask": [1], "logprobs": None}
    assert from_dict(least) == TrainingSample("0", [1], [2], [1], None)


WRONG_VALUES: dict[str, tuple[Any, str]] = {
    "segment_id": (7, "segment_id is not a string"),
    "prompt_ids": ([1, -1], r"prompt_ids\[1\] is not an integer from 0"),
    "response_ids": ([2**31] * 7, r"response_ids\[0\] is not"),
    "response_mask": ([True] * 7, r"response_mask\[0\] is not"),
    "logprobs": ([float("nan")] * 7, r"logprobs\[0\] is not a finite number"),
    "spans": ([{"author": "model", "reason": None, "turn": 1, "start": 0}], r"spans\[0\]\.stop is missing"),
    "parent_tokens": (-1, "parent_tokens is not an integer"),
    "verified": (1, "verified is neither"),
    "truncated": (None, "truncated is neither"),
    "reward": (10**400, "reward is not a finite number"),
    "scores": ({"a": "b"}, r"scores\['a'\] is not"),
    "reason": (None, "reason is not a string"),
    "logprob": ([0.0], "'logprob' is not a known field"),
}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_a_wrong_dictionary_is_refused_by_name(name: str) -> None:
    value, named = WRONG_VALUES[name]
    with pytest.raises(ValueError, match=named):
        from_dict({**to_dict(sample()), name: value})


@pytest.mark.parametrize("value", [None, [], "x", {}])
def test_what_is_no_sample(value: Any) -> None:
    with pytest.raises(ValueError, match=r"not an object|segment_id is missing"):
        from_dict(value)


def test_verl_takes_its_fields() -> None:
    given_sample = sample(reward=0.75, completion_ms=1500.0, tool_ms=250.0, group_id="g")
    made = to_verl(given_sample)
    assert set(made) <= VERL_FIELDS
    assert set(made["metrics"]) <= VERL_METRICS
    assert (made["prompt_ids"], made["response_ids"]) == (given_sample.prompt_ids, given_sample.response_ids)
    assert (made["response_mask"], made["response_logprobs"]) == ([1, 1, 0, 0, 0, 1, 1], given_sample.logprobs)
    assert (made["reward_score"], made["metrics"]) == (0.75, {"generate_sequences": 1.5, "tool_calls": 0.25})
    assert made["extra_fields"]["rollout_sample"]["group_id"] == "g"
    assert len(made["extra_fields"]["rollout_sample"]["spans"]) == 4


def test_nothing_of_ours_takes_the_place_of_a_column_of_verl() -> None:
    """verl makes a column of each key, and its "uid" groups samples."""
    found = to_verl(sample())["extra_fields"]
    assert sorted(found) == ["max_global_steps", "min_global_steps", "rollout_sample", "turn_scores"]
    # verl's own column, as verl's loops without rewards fill it.
    assert to_verl(sample())["extra_fields"]["turn_scores"] == []


@pytest.mark.parametrize("known", [True, False], ids=["spans", "mask"])
def test_verl_counts_prompt_answers_and_what_stands_between(known: bool) -> None:
    changes = {} if known else {"spans": None}
    assert to_verl(sample(**changes))["num_turns"] == 4
    once = samples(outcome_of(*TURNS[:2]))[0]
    assert to_verl(dataclasses.replace(once, **changes))["num_turns"] == 2


def test_unknown_logprobs_and_no_reward_are_none_for_verl() -> None:
    made = to_verl(sample(logprobs=None))
    assert (made["response_logprobs"], made["reward_score"]) == (None, None)


def test_trl_gets_a_row_for_each_prompt() -> None:
    made = to_trl([sample("a", reward=1.0), sample("b", truncated=True)])
    assert {"prompt_ids", "completion_ids", "logprobs"} <= set(made)
    assert made["env_mask"] == [[1, 1, 0, 0, 0, 1, 1]] * 2
    assert made["completion_ids"] == [sample().response_ids] * 2
    assert made["logprobs"] == [sample().logprobs] * 2
    assert (made["rollout_reward"], made["rollout_truncated"]) == ([1.0, None], [False, True])
    assert all(len(rows) == 2 for rows in made.values())  # type: ignore[arg-type]


def test_trl_gets_logprobs_of_all_rows_or_none() -> None:
    assert to_trl([sample("a"), sample("b", logprobs=None)])["logprobs"] is None


def test_a_row_that_does_not_train_takes_no_logprobs_from_the_others() -> None:
    failed = sample("b", logprobs=None, trainable=False, untrainable_reason="failure_engine")
    made = to_trl([sample("a"), failed])
    assert made["logprobs"] == [sample().logprobs, [0.0] * 7]
    assert made["env_mask"][1] == [0] * 7
    assert to_trl([failed])["logprobs"] is None
    assert to_trl([])["logprobs"] == []


def test_trl_gets_no_second_row_of_a_rollout() -> None:
    with pytest.raises(ValueError, match="'a' has 2 samples"):
        to_trl([sample("a"), sample("b"), sample("a", segment_id="1")])
    assert len(to_trl([sample(""), sample("")])["prompt_ids"]) == 2
    assert to_trl([])["prompt_ids"] == []

"""Rewards of random trees of segments, by each rule: in samples, and in the shapes of verl and TRL."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
from hypothesis import given as given_by
from hypothesis import settings
from osmosis.rollout.v1 import outcome_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_client import TrainingSample, samples
from rollout_client.export import to_trl, to_verl

from tests.support.random_rollouts import outcome_of, rollouts, span

COPY, SPLIT, OWN = outcome_pb2.REWARD_RULE_COPY, outcome_pb2.REWARD_RULE_SPLIT, outcome_pb2.REWARD_RULE_OWN


def exported(sample: TrainingSample) -> tuple[list[float | None], list[list[float]]]:
    """The reward and the turn rewards in the shapes of verl and TRL."""
    verl, trl = to_verl(sample), to_trl([sample])
    return [verl["reward_score"], *trl["rollout_reward"]], [
        verl["extra_fields"]["turn_scores"],
        *trl["rollout_turn_scores"],
    ]


@settings(max_examples=150)
@given_by(rollouts())
def test_every_shape_has_the_rewards_by_the_rule(rollout: pb.Rollout) -> None:
    outcome, found = rollout.outcome, samples(rollout)
    whole = outcome.reward if outcome.HasField("reward") else None
    trained = [sample for sample in found if sample.trainable]
    assert all(sample.reward is None for sample in found if not sample.trainable)
    if outcome.reward_rule == COPY:
        assert all(sample.reward == whole for sample in trained)
    elif outcome.reward_rule == SPLIT:
        assert len({sample.reward for sample in trained}) <= 1
        rewards = [sample.reward for sample in trained if sample.reward is not None]
        assert (len(rewards) == len(trained)) if whole is not None else not rewards
        assert not rewards or math.isclose(sum(rewards), whole or 0.0, abs_tol=1e-9)
    else:
        roles = json.loads(outcome.extra_json)["roles"] or {}
        for sample in trained:
            given = [each.value for each in sample.turn_rewards] + [
                roles[name] for name in roles if name == sample.role
            ]
            judged = bool(given) and outcome.HasField("stop")
            assert sample.reward == (pytest.approx(math.fsum(given), abs=1e-9) if judged else None)
    for sample in found:
        rewards_, scores = exported(sample)
        assert rewards_ == [sample.reward] * 2
        assert scores == [sample.turn_scores] * 2
        assert math.isclose(sum(sample.turn_scores), sum(each.value for each in sample.turn_rewards), abs_tol=1e-9)


@settings(max_examples=150)
@given_by(rollouts())
def test_what_was_given_to_turns_is_in_exactly_one_sample(rollout: pb.Rollout) -> None:
    found = samples(rollout)
    given = {(each.turn, each.value): each.segment_id for each in rollout.outcome.turn_rewards}
    listed = {(each.turn, each.value): sample.segment_id for sample in found for each in sample.turn_rewards}
    ids = {sample.segment_id for sample in found}
    assert listed == {key: segment for key, segment in given.items() if segment in ids}
    assert max(Counter(each.turn for sample in found for each in sample.turn_rewards).values(), default=1) == 1
    for sample in found:
        assert sample.spans is not None
        written = {span.turn for span in sample.spans if span.author == "model"}
        with_tokens = [each for each in sample.turn_rewards if each.turn in written]
        assert len(sample.turn_scores) in (0, len(written | {each.turn for each in sample.turn_rewards}))
        assert sum(map(bool, sample.turn_scores)) >= sum(bool(each.value) for each in with_tokens)


@settings(max_examples=150)
@given_by(rollouts())
def test_segments_say_what_samples_say(rollout: pb.Rollout) -> None:
    segments = {segment.id: segment for segment in rollout.outcome.segments}
    for sample in rollout.outcome.samples:
        segment = segments[sample.segment_id]
        assert (segment.role, segment.HasField("reward"), segment.reward) == (
            sample.role,
            sample.HasField("reward"),
            sample.reward,
        )
        assert segment.trainable or not sample.trainable


TURNS = (span("prompt", 2), span("model", 2), span("environment", 3, turn=2), span("model", 2, turn=2))


def with_rewards(rule: int, *given: tuple[int, float], reward: float | None = None) -> TrainingSample:
    outcome = outcome_of(*TURNS, **({} if reward is None else {"reward": reward}))
    outcome.reward, outcome.reward_rule = 4.0, rule  # type: ignore[assignment]
    for turn, value in given:
        outcome.turn_rewards.add(turn=turn, value=value, segment_id="0")
    outcome.turn_rewards.add(turn=9, value=7.0, segment_id="another")
    return samples(outcome)[0]


@pytest.mark.parametrize("rule", [COPY, SPLIT, OWN])
def test_the_reward_of_a_sample_is_the_servers(rule: int) -> None:
    assert exported(with_rewards(rule, reward=0.5))[0] == [0.5, 0.5]
    assert exported(with_rewards(rule))[0] == [None, None]
    assert exported(with_rewards(rule, reward=0.0))[0] == [0.0, 0.0]


def test_a_server_without_rules_sends_the_reward_of_the_rollout() -> None:
    sample = with_rewards(outcome_pb2.REWARD_RULE_UNSPECIFIED)
    assert (sample.reward, sample.trainable, sample.role) == (4.0, True, "agent")


def test_a_turn_without_a_reward_counts_zero_among_others() -> None:
    assert exported(with_rewards(OWN, (2, -0.5)))[1] == [[0.0, -0.5]] * 2
    assert exported(with_rewards(OWN))[1] == [[], []]

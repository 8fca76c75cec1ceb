"""Stale tokens: masked out or split off when a rollout ends, as a function of the log. Random ledgers against a naive reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_server.core.ledger import MaskReason, PolicyRun, Role, SegmentKind
from rollout_server.core.limits import Limits
from rollout_server.core.machine import Machine, replay
from rollout_server.core.message import Message
from rollout_server.core.outcome import (
    Cancellation,
    Outcome,
    RewardResult,
    RewardRule,
    Stop,
    sample_rewards,
    segment_rewards,
    training_verdict,
)
from rollout_server.core.record import Answered, Ended, Masked, Record, Rewarded
from rollout_server.core.segment import SamplePart, pack_logprobs
from rollout_server.core.spec import StaleAction, Staleness
from rollout_server.core.staleness import MOST_PARTS, sample_parts

from tests.support.machine_records import USER, ids, predicts, shown_outcome

SAID = Message.write({"role": "assistant", "content": "."})
STEPS = st.none() | st.integers(0, 8)
RUNS = st.lists(st.tuples(st.integers(1, 3), STEPS), max_size=3)
TURNS = st.lists(st.tuples(RUNS, st.booleans()), min_size=1, max_size=6)
"""Per turn the runs of its completion as (tokens, step), and whether the author masks it out."""


def ended(
    turns: Sequence[tuple[Sequence[tuple[int, int | None]], bool]],
    staleness: Staleness | None,
    announced: int | None = None,
    end: Ended | None = None,
) -> tuple[Machine, Outcome, list[Record]]:
    """A rollout with one conversation and these turns; turn n of the first 15 has a reward of 2 ** n."""
    machine, log, token = Machine("u", [USER], Limits(), staleness), list[Record](), 1000
    for number, (runs, out) in enumerate(turns, start=1):
        asked = machine.request_completion()
        log += machine.accept(asked)  # type: ignore[arg-type]
        count = sum(tokens for tokens, _ in runs)
        sampled = tuple(
            PolicyRun(sum(tokens for tokens, _ in same), "v", step) for step, same in groupby(runs, lambda run: run[1])
        )
        answer, token = ids(*range(token, token + count)), token + count
        known = pack_logprobs([-1.0] * count)
        record = Answered(number, SAID, "stop", answer, known, predicts(number), runs=sampled)
        log += machine.accept(record)
        log += machine.accept(Rewarded(number, 2.0 ** (number % 16)))
        if out:
            log += machine.accept(Masked(number, "a plan"))
    closing = end or Ended(Stop("stop"), RewardResult(8.0), policy_step=announced)
    log += machine.accept(closing)
    assert machine.outcome is not None
    return machine, machine.outcome, log


def naive(outcome: Outcome, staleness: Staleness) -> tuple[list[tuple[int, bool, bool, bool]], int | None]:
    """Each token of the only segment as (id, model, out, stale), by definition, before any mask of stale tokens."""
    spans = outcome.segments[0].spans
    steps = [span.policy_step for span in spans if span.policy_step is not None]
    newest = max([*steps, *([outcome.policy_step] if outcome.policy_step is not None else [])], default=None)
    found = []
    for span in spans:
        model, out = span.author.value == "model", span.reason is MaskReason.AUTHOR
        known = span.policy_step is not None and newest is not None
        stale = model and not out and known and newest - span.policy_step > staleness.max_lag  # type: ignore[operator]
        found += [(token, model, out, stale) for token in outcome.segments[0].ids(span.start, span.stop)]
    return found, newest


@given(TURNS, st.integers(0, 8), STEPS)
def test_mask_masks_exactly_the_tokens_that_lag_too_far(turns: list, max_lag: int, announced: int | None) -> None:
    staleness = Staleness(max_lag, StaleAction.MASK)
    machine, outcome, log = ended(turns, staleness, announced)
    tokens, newest = naive(outcome, staleness)
    assert outcome.policy_step == newest
    (part,) = sample_parts(outcome.segments[0], staleness, outcome.policy_step)
    sample = part.sample()
    cut = len(sample.prompt_ids)
    assert list(sample.response_mask) == [model and not out and not stale for _, model, out, stale in tokens[cut:]]
    assert not any(model for _, model, _, _ in tokens[:cut])
    reasons = [span.reason for span in outcome.segments[0].spans for _ in range(span.start, span.stop)]
    assert [reason is MaskReason.STALE for reason in reasons] == [stale for *_, stale in tokens]
    again = replay(Machine("u", [USER], Limits(), staleness), log).outcome
    assert again is not None
    assert shown_outcome(again) == shown_outcome(outcome)
    assert machine.newest_policy_step == max((s for runs, _ in turns for _, s in runs if s is not None), default=None)


@given(TURNS, st.integers(0, 8), STEPS)
def test_split_puts_each_sampled_token_into_one_response_of_one_age(
    turns: list, max_lag: int, announced: int | None
) -> None:
    staleness = Staleness(max_lag, StaleAction.SPLIT)
    _, outcome, _ = ended(turns, staleness, announced)
    tokens, newest = naive(outcome, staleness)
    segment = outcome.segments[0]
    parts = sample_parts(segment, staleness, newest)
    assert [part.index for part in parts] == list(range(len(parts)))
    whole, ages = [token for token, *_ in tokens], {token: stale for token, _, _, stale in tokens}
    trained = [token for token, model, out, _ in tokens if model and not out]
    seen, sampled = list[int](), list[int]()
    for part in parts:
        sample = part.sample()
        prompt, response = list(sample.prompt_ids), list(sample.response_ids)
        assert prompt + response == whole[: len(prompt) + len(response)], (
            "each part begins with the whole segment so far"
        )
        assert sample.logprobs is not None
        assert [value != 0 for value in sample.logprobs] == [bool(bit) for bit in sample.response_mask]
        here = [token for token, bit in zip(response, sample.response_mask, strict=True) if bit]
        assert all(ages[token] is part.stale for token in here)
        assert not part.index or here[:1] == response[:1], "a later part begins with its first trained token"
        seen += here
        sampled += [token for token in response if token >= 1000]
        spans = part.spans
        assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
        assert (spans[0].stop, spans[0].reason) == (len(prompt), MaskReason.PROMPT)
        assert spans[-1].stop == len(prompt) + len(response)
        assert not response or response[-1] >= 1000, "a sample ends with a sampled token"
    assert seen == trained
    assert sampled == [token for token in whole if token >= 1000]
    changes = [key for key, _ in groupby(ages[token] for token in trained)]
    assert [part.stale for part in parts] == (changes or [False])
    verdicts = [training_verdict(outcome, part, None) for part in parts]
    assert verdicts == [(not s, "stale" if s else "") for s in changes] if changes else [(False, "no_trained_tokens")]


@given(TURNS, st.integers(0, 8), STEPS, st.sampled_from(RewardRule))
def test_samples_that_are_split_get_rewards_by_the_rule(
    turns: list, max_lag: int, announced: int | None, rule: RewardRule
) -> None:
    staleness, end = Staleness(max_lag, StaleAction.SPLIT), Ended(Stop("stop"), RewardResult(8.0), reward_rule=rule)
    _, outcome, _ = ended(turns, staleness, end=end)
    parts = sample_parts(outcome.segments[0], staleness, outcome.policy_step)
    rewards = sample_rewards(outcome, parts)
    fresh = [part for part in parts if training_verdict(outcome, part, None)[0]]
    if rule is not RewardRule.OWN:
        share = max(1, len(fresh)) if rule is RewardRule.SPLIT else 1
        assert rewards == dict.fromkeys(fresh, 8.0 / share)
    else:
        held = {part: {span.turn for span in part.response if span.author.value == "model"} for part in parts}
        given = sum(2.0**turn for turn in {t for part in fresh for t in held[part]})
        empty = sum(2.0**n for n, (runs, _) in enumerate(turns, start=1) if not runs)
        assert sum(rewards.values()) in ((given, given + empty) if fresh else (0,)), "each turn once, or not at all"
        assert rewards.keys() <= set(fresh)
    if len(parts) == 1 and not parts[0].stale:
        assert list(rewards.values()) == list(segment_rewards(outcome).values())


@given(TURNS, st.integers(0, 8), STEPS, st.sampled_from([None, StaleAction.KEEP, StaleAction.CANCEL]))
def test_nothing_else_changes_a_token(
    turns: list, max_lag: int, announced: int | None, action: StaleAction | None
) -> None:
    staleness = None if action is None else Staleness(max_lag, action)
    _, outcome, _ = ended(turns, staleness, announced)
    _, plain, _ = ended(turns, None, announced)
    assert shown_outcome(replace(outcome, warnings=())) == shown_outcome(plain)
    assert sample_parts(outcome.segments[0], staleness, outcome.policy_step) == (SamplePart.whole(outcome.segments[0]),)


@given(TURNS, st.sampled_from([None, *StaleAction]))
def test_one_warning_says_that_tokens_that_train_have_no_step(turns: list, action: StaleAction | None) -> None:
    _, outcome, _ = ended(turns, None if action is None else Staleness(8, action))
    unknown = [turn for turn, (runs, out) in enumerate(turns, 1) if not out and any(step is None for _, step in runs)]
    expected = [("policy_step_missing", unknown[0])] if unknown and action is not None else []
    assert [(warned.code, warned.turn) for warned in outcome.warnings] == expected


def test_a_segment_is_not_split_into_more_samples_than_there_may_be() -> None:
    staleness = Staleness(0, StaleAction.SPLIT)
    for turns, parts in ((MOST_PARTS, MOST_PARTS), (MOST_PARTS + 1, 1)):
        _, outcome, _ = ended([([(1, step % 2)], False) for step in range(turns)], staleness)
        assert len(sample_parts(outcome.segments[0], staleness, 1)) == parts
        assert [warned.code for warned in outcome.warnings] == (["stale_masked"] if parts == 1 else [])
    assert sum(outcome.segments[0].sample().response_mask) == turns // 2


def test_steps_of_further_models_are_not_compared() -> None:
    staleness = Staleness(0, StaleAction.MASK)
    machine = Machine("u", [USER], Limits(), staleness)
    fork = machine.fork(SegmentKind.SUBAGENT, (USER,), role=Role("judge", trainable=False, model="large"))
    machine.accept(fork)
    for conversation, step in ((machine.main, 3), (machine._conversations[fork.segment_id], 90)):
        asked = machine.request_completion(conversation)
        machine.accept(asked)  # type: ignore[arg-type]
        machine.accept(Answered(machine.turn, SAID, "stop", ids(1), None, predicts(2), policy_step=step))
    assert (machine.oldest_policy_step, machine.newest_policy_step) == (3, 3)
    machine.accept(Ended(Stop("stop"), policy_step=4))
    assert machine.outcome is not None
    assert [segment.sample().response_mask for segment in machine.outcome.segments] == [b"\0", b"\1"]
    assert machine.outcome.policy_step == 4


def test_a_rollout_that_was_cancelled_has_its_stale_masks_too() -> None:
    staleness, runs = Staleness(1, StaleAction.MASK), [(2, 1), (1, 5)]
    _, outcome, _ = ended([(runs, False)], staleness, end=Ended(Cancellation("stale"), policy_step=6))
    (part,) = sample_parts(outcome.segments[0], staleness, outcome.policy_step)
    assert (part.sample().response_mask, outcome.policy_step) == (b"\0\0\1", 6)
    assert training_verdict(outcome, part, None) == (False, "cancelled")


@pytest.mark.parametrize("step", [None, 3])
def test_a_turn_without_ids_counts_for_the_newest_step_only(step: int | None) -> None:
    machine = Machine("u", [USER], Limits())
    machine.accept(machine.request_completion())  # type: ignore[arg-type]
    machine.accept(Answered(1, SAID, "stop", None, policy_step=step))
    assert (machine.oldest_policy_step, machine.newest_policy_step) == (None, step)

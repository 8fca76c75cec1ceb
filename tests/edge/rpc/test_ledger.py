"""The ledger received over the wire, against its laws and the strict trainer's record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from osmosis.rollout.v1 import event_pb2, outcome_pb2, spec_pb2, token_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_server.testing.script import Script, ScriptedReply, tool_call
from rollout_server.testing.trainer import StrictTrainer

from tests.edge.rpc.ledger_laws import lawful, same_sample
from tests.support.server_client import Caller
from tests.support.start_requests import json_message, start, target
from tests.support.trainer_scenarios import SCENARIOS

HEALTHY = (
    "add_then_multiply",
    "arguments_not_an_object",
    "bad_json_arguments",
    "dict_arguments",
    "division_by_zero",
    "finish_reason_ignored",
    "number_formats",
    "parallel_calls",
    "plain_answer",
    "string_operands",
    "string_vs_compact_arguments",
    "three_turns_mixed_content",
    "tool_call_extra_keys",
    "unknown_tool",
    "wrong_arguments",
)
ADD = ScriptedReply(content="Adding.", tool_calls=(tool_call("call_1", "add", '{"a": 5, "b": 3}'),))


async def played(caller: Caller, trainer: StrictTrainer, script: Script | None = None, **changes: Any) -> pb.Rollout:
    """A finished rollout of the calculator."""
    if script is not None:
        await trainer.put_script("r", script)
    return await caller.play(start(agent="calculator", completions=target(trainer.url), **changes))


@pytest.mark.parametrize("name", HEALTHY)
async def test_a_sample_is_what_the_trainer_accumulated(caller: Caller, trainer: StrictTrainer, name: str) -> None:
    outcome = (await played(caller, trainer, SCENARIOS[name].script)).outcome
    assert outcome.stop.reason == "stop"
    lawful(outcome)
    verdict = trainer.verdict("r")
    assert verdict is not None
    assert verdict.accepted
    [sample] = outcome.samples
    same_sample(sample, verdict.sample)
    assert outcome.segments[0].verified
    assert outcome.segments[0].origin.kind == token_pb2.SEGMENT_KIND_MAIN
    assert outcome.metrics.turns == len(verdict.turns)
    assert outcome.metrics.prompt_tokens == sum(turn.prompt_tokens for turn in verdict.turns)
    assert outcome.metrics.max_context_tokens == max(turn.prompt_tokens + turn.answer_tokens for turn in verdict.turns)
    assert not outcome.warnings


@pytest.mark.parametrize("typed", [False, True])
async def test_both_forms_give_the_same_sample(caller: Caller, trainer: StrictTrainer, typed: bool) -> None:
    message = json_message()
    if typed:
        message.chat.role = "user"
        message.chat.parts.add(text="Please calculate 5 plus 3, then multiply by 2.")
    outcome = (await played(caller, trainer, messages=[message])).outcome
    assert [m.WhichOneof("form") for m in outcome.messages] == ["chat" if typed else "json"] * len(outcome.messages)
    lawful(outcome)
    verdict = trainer.verdict("r")
    assert verdict is not None
    same_sample(outcome.samples[0], verdict.sample)


async def test_a_cut_answer_is_closed_by_nobody_who_trains(caller: Caller, trainer: StrictTrainer) -> None:
    cut = replace(ADD, cut=True, finish_reason="length")
    outcome = (await played(caller, trainer, Script((cut, ScriptedReply(content="8", cut=True))))).outcome
    lawful(outcome)
    verdict = trainer.verdict("r")
    assert verdict is not None
    same_sample(outcome.samples[0], verdict.sample)
    reasons = [span.mask_reason for span in outcome.segments[0].spans]
    assert reasons == [
        token_pb2.MASK_REASON_PROMPT,
        token_pb2.MASK_REASON_UNSPECIFIED,
        token_pb2.MASK_REASON_CLOSING,
        token_pb2.MASK_REASON_ENVIRONMENT,
        token_pb2.MASK_REASON_UNSPECIFIED,
    ]
    assert outcome.stop.truncated


async def test_what_no_turn_saw_is_not_in_the_sample(caller: Caller, trainer: StrictTrainer) -> None:
    outcome = (await played(caller, trainer, Script((ADD,), repeat_last=True), limits={"turns": 2})).outcome
    assert outcome.stop.reason == "max_turns"
    assert outcome.metrics.tool_calls == 2
    lawful(outcome)
    verdict = trainer.verdict("r")
    assert verdict is not None
    same_sample(outcome.samples[0], verdict.sample)


@pytest.mark.parametrize("omitted", ["logprobs", "prompt_token_ids"])
async def test_what_the_trainer_does_not_send_is_unknown(caller: Caller, trainer: StrictTrainer, omitted: str) -> None:
    last = ScriptedReply(content="8", omit=frozenset({omitted}))
    outcome = (await played(caller, trainer, Script((ADD, last)))).outcome
    lawful(outcome)
    [sample], [segment] = outcome.samples, outcome.segments
    assert sample.HasField("logprobs") == (omitted != "logprobs")
    assert segment.verified == (omitted != "prompt_token_ids")
    assert [warning.code for warning in outcome.warnings] == [
        "logprobs_missing" if omitted == "logprobs" else "unverified"
    ]
    verdict = trainer.verdict("r")
    assert verdict is not None
    assert tuple(sample.response_ids) == verdict.sample.response_ids
    assert tuple(sample.response_mask) == verdict.sample.response_mask


async def test_drift_opens_a_segment_that_obeys_the_laws(caller: Caller, trainer: StrictTrainer) -> None:
    surplus = replace(ADD, surplus=(0, 1, 2))
    outcome = (await played(caller, trainer, Script((surplus, ScriptedReply(content="8"))))).outcome
    lawful(outcome)
    [warning] = outcome.warnings
    assert (warning.code, warning.turn) == ("token_drift", 2)
    first_segment, second = outcome.segments
    assert (second.origin.kind, second.origin.parent_id) == (token_pb2.SEGMENT_KIND_DRIFT, first_segment.id)
    assert second.origin.parent_tokens == warning.index
    events = await caller.events((await _only(caller)).uid, detail=event_pb2.EVENT_DETAIL_FULL)
    [drift] = [event for event in events if event.WhichOneof("event") == "drift_found"]
    assert (drift.drift_found.index, drift.turn) == (warning.index, 2)
    opened = [event for event in events if event.WhichOneof("event") == "segment_opened"]
    assert [event.segment_id for event in opened] == [first_segment.id, second.id]
    assert [event.segment_opened.origin for event in opened] == [first_segment.origin, second.origin]
    assert [event.segment_opened.prompt_tokens for event in opened] == [
        len(sample.prompt_ids) for sample in outcome.samples
    ]


async def test_drift_ends_the_rollout_where_it_was_asked_to(caller: Caller, trainer: StrictTrainer) -> None:
    surplus = replace(ADD, surplus=(0, 1, 2))
    script = Script((surplus, ScriptedReply(content="8")))
    outcome = (await played(caller, trainer, script, on_drift=spec_pb2.DRIFT_POLICY_FAIL)).outcome
    assert outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_TOKEN_DRIFT
    assert outcome.failure.turn == 2
    lawful(outcome)


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("trainer_500_second_turn", outcome_pb2.FAILURE_CATEGORY_TRAINER_SERVER),
        ("trainer_missing_token_ids_second_turn", outcome_pb2.FAILURE_CATEGORY_VALIDATION),
        ("trainer_422", outcome_pb2.FAILURE_CATEGORY_TRAINER_CLIENT),
    ],
)
async def test_a_failure_keeps_the_ledger_so_far(
    caller: Caller, trainer: StrictTrainer, name: str, category: int
) -> None:
    outcome = (await played(caller, trainer, SCENARIOS[name].script)).outcome
    assert (outcome.failure.category, outcome.failure.turn, outcome.metrics.turns) == (category, 2, 1)
    assert len(outcome.messages) == 3
    lawful(outcome)
    assert len(outcome.samples) == 1


async def _only(caller: Caller) -> pb.Rollout:
    page: pb.ListRolloutsResponse = await caller.stub.ListRollouts(pb.ListRolloutsRequest())
    [rollout] = page.rollouts
    return rollout

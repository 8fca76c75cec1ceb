"""Message mode over gRPC: the trainer renders, its ids are authoritative, and both sides name the same segments."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import outcome_pb2, token_pb2
from rollout_client import AsyncClient, samples
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.settings import Settings
from rollout_server.testing.script import Lie, Script, ScriptedReply, tool_call
from rollout_server.testing.trainer import StrictTrainer

from tests.support.rewriting_trainer import rewriting
from tests.support.talking_agent import equal, warned

QUESTION = {"role": "user", "content": "Please calculate 5 plus 3, then multiply by 2."}
DRIFT = outcome_pb2.FAILURE_CATEGORY_TOKEN_DRIFT


@pytest.fixture
async def client() -> AsyncIterator[AsyncClient]:
    ports: Any = {"host": "127.0.0.1", "http_port": 0, "grpc_port": 0, "http": False, "retry_base_seconds": 0.01}
    async with (
        Server([Calculator()], Settings(_env_file=None, **ports)) as server,
        AsyncClient(f"127.0.0.1:{server.grpc_port}") as client,
    ):
        yield client


async def roll(client: AsyncClient, trainer: StrictTrainer, **spec: Any) -> outcome_pb2.Outcome:
    url = f"grpc://{trainer.grpc_target}"
    run = client.run(messages=[QUESTION], completions=url, rollout_id="r", **spec)
    async for _ in run:
        pass
    return (await client.get(run.uid, view="full")).outcome


def adding(number: int, **more: Any) -> ScriptedReply:
    """A turn that calls a tool."""
    return ScriptedReply(tool_calls=(tool_call(f"call_{number}", "add", f'{{"a": {number}, "b": 1}}'),), **more)


def sent(trainer: StrictTrainer) -> Sequence[pb.CompleteRequest]:
    return [seen.request for seen in trainer.completions]


def kinds(outcome: outcome_pb2.Outcome) -> list[int]:
    return [sample.origin.kind for sample in outcome.samples]


async def test_samples_are_the_trainers_own(client: AsyncClient) -> None:
    async with StrictTrainer() as trainer:
        outcome = await roll(client, trainer)
        verdict = trainer.verdict("r")
    assert verdict is not None
    assert (outcome.stop.reason, warned(outcome), verdict.refusals) == ("stop", [], ())
    assert len(verdict.turns) == 3
    (sample,) = samples(outcome)
    assert equal(sample, verdict.sample)
    first, *others = sent(trainer)
    assert (first.origin.kind, first.HasField("base")) == (token_pb2.SEGMENT_KIND_MAIN, False)
    assert [request.base.messages for request in others] == [2, 4]
    assert [len(request.new_messages) for request in others] == [1, 1]
    assert not any(request.HasField("origin") or request.tools.tools for request in others)
    assert {request.tools.digest for request in others} == {first.tools.digest}
    assert not any(request.HasField("new_tokens") for request in sent(trainer))


THINKING = Script(lines=(adding(1, reasoning="One."), adding(2), adding(3), ScriptedReply(content="Done.")))


async def test_drift_opens_a_segment_that_both_sides_name_alike(client: AsyncClient, tmp_path: Path) -> None:
    async with rewriting(tmp_path, THINKING) as trainer:
        outcome = await roll(client, trainer)
        verdict = trainer.verdict("r")
    assert (outcome.failure.message, outcome.stop.reason) == ("", "stop")
    assert verdict is not None
    assert [turn.drift is not None for turn in verdict.turns] == [False, True, False, False]
    assert warned(outcome) == ["token_drift"]
    assert kinds(outcome) == [token_pb2.SEGMENT_KIND_MAIN, token_pb2.SEGMENT_KIND_DRIFT]
    requests = sent(trainer)
    assert [request.segment_id for request in requests] == ["0", "0", "1", "1"]
    assert [request.HasField("origin") for request in requests] == [True, False, True, False]
    assert [request.HasField("base") for request in requests] == [False, True, True, True]
    assert requests[2].origin == outcome.samples[1].origin
    assert requests[2].origin.parent_tokens == verdict.turns[1].drift
    drifted = samples(outcome)[1]
    assert len(drifted.prompt_ids) == verdict.turns[1].prompt_tokens
    assert sum(drifted.response_mask) == sum(turn.answer_tokens for turn in verdict.turns[1:])


async def test_drift_ends_the_rollout_that_wants_it_so(client: AsyncClient, tmp_path: Path) -> None:
    async with rewriting(tmp_path, THINKING) as trainer:
        outcome = await roll(client, trainer, on_drift="fail")
    assert (outcome.failure.category, outcome.failure.turn) == (DRIFT, 2)
    assert len(sent(trainer)) == 2


@pytest.mark.parametrize("lie", [Lie.AFTER_DIGEST, Lie.CHANGED_ID, Lie.DROPPED_ID, Lie.OTHER_TURN])
async def test_another_digest_ends_the_rollout_on_its_turn(client: AsyncClient, lie: Lie) -> None:
    script = Script(lines=(adding(1), adding(2, lie=lie), ScriptedReply(content="Done.")))
    async with StrictTrainer(script=script) as trainer:
        outcome = await roll(client, trainer)
    assert (outcome.failure.category, outcome.failure.turn) == (DRIFT, 2)
    assert outcome.failure.message.startswith("turn 2: the trainer holds other tokens than this server")
    assert len(sent(trainer)) == 2
    (sample,) = samples(outcome)
    assert {span.turn for span in sample.spans or ()} == {1}


async def test_an_answer_that_comes_twice_is_not_trained_twice(client: AsyncClient) -> None:
    script = Script(lines=(adding(1), adding(2, lie=Lie.REPLAYED_TURN), ScriptedReply(content="Done.")))
    async with StrictTrainer(script=script) as trainer:
        outcome = await roll(client, trainer)
    assert (outcome.failure.category, outcome.failure.turn) == (DRIFT, 2)
    assert outcome.failure.message == "turn 2: the trainer repeated the prompt and completion of turn 1"
    assert len(samples(outcome)) == 1


@pytest.mark.parametrize("omitted", ["token_ids", "prompt_token_ids"])
async def test_a_turn_without_ids_is_in_no_sample_and_the_next_prompt_opens_a_segment(
    client: AsyncClient, omitted: str
) -> None:
    lines = (adding(1), adding(2, omit=frozenset({omitted})), adding(3), adding(4), ScriptedReply(content="Done."))
    async with StrictTrainer(script=Script(lines=lines)) as trainer:
        outcome = await roll(client, trainer)
        turns = [turn for verdict in trainer.verdicts() for turn in verdict.turns]
    assert (outcome.failure.message, outcome.stop.reason) == ("", "stop")
    assert warned(outcome) == ["tokens_unknown", "unverified", "unverified", "unverified"]
    assert kinds(outcome) == [token_pb2.SEGMENT_KIND_MAIN, token_pb2.SEGMENT_KIND_GAP]
    requests = sent(trainer)
    assert [request.segment_id for request in requests] == ["0", "0", "0", "1", "1"]
    assert [request.HasField("base") for request in requests] == [False, True, False, True, True]
    assert [request.HasField("origin") for request in requests] == [True, False, False, True, False]
    assert requests[3].origin == outcome.samples[1].origin
    assert [sum(sample.response_mask) for sample in samples(outcome)] == [
        turns[0].answer_tokens,
        sum(turn.answer_tokens for turn in turns[2:]),
    ]


async def test_a_first_turn_without_ids_begins_the_first_segment_late(client: AsyncClient) -> None:
    lines = (adding(1, omit=frozenset({"token_ids"})), adding(2), ScriptedReply(content="Done."))
    async with StrictTrainer(script=Script(lines=lines)) as trainer:
        outcome = await roll(client, trainer)
    assert (outcome.failure.message, outcome.stop.reason) == ("", "stop")
    assert kinds(outcome) == [token_pb2.SEGMENT_KIND_MAIN]
    assert [request.segment_id for request in sent(trainer)] == ["0", "0", "0"]
    assert [request.HasField("origin") for request in sent(trainer)] == [True, False, False]


async def test_a_trainer_that_forgot_gets_everything_once_and_the_sample_stays_whole(client: AsyncClient) -> None:
    lines = (adding(1), adding(2, forgets=True), adding(3), ScriptedReply(content="Done."))
    async with StrictTrainer(script=Script(lines=lines)) as trainer:
        outcome = await roll(client, trainer)
        verdict = trainer.verdict("r")
    assert (outcome.failure.message, outcome.stop.reason, warned(outcome)) == ("", "stop", [])
    assert verdict is not None
    requests = sent(trainer)
    assert [request.turn for request in requests] == [1, 2, 3, 3, 4]
    refused, whole = requests[2:4]
    assert refused.turn_key == whole.turn_key
    assert (whole.HasField("base"), len(whole.new_messages), bool(whole.tools.tools)) == (False, 5, True)
    (sample,) = samples(outcome)
    assert sample.response_ids == list(verdict.sample.response_ids)
    assert sample.response_mask == list(verdict.sample.response_mask)

"""Token mode with the tests' own trainer: the data sent, retries, and every lie at its turn."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import outcome_pb2, token_pb2
from rollout_client import AsyncClient, TrainingSample, samples
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from transformers import AutoTokenizer

from tests.support.grpc_trainer import BASE_UNKNOWN, Fault, GrpcTrainer, info, serving
from tests.support.talking_agent import Talk, connected, warned

TURNS = 4
DRIFT = outcome_pb2.FAILURE_CATEGORY_TOKEN_DRIFT
NOW = error_details_pb2.RetryInfo(retry_delay=Duration(nanos=1000))


@pytest.fixture(scope="module")
def toy() -> Any:
    return AutoTokenizer.from_pretrained(TOY_TOKENIZER)


@pytest.fixture
def answer(toy: Any) -> list[int]:
    return list(toy.encode("Yes.<|im_end|>", add_special_tokens=False))


@pytest.fixture
async def client() -> AsyncIterator[AsyncClient]:
    async with connected(Talk(TURNS)) as client:
        yield client


async def roll(client: AsyncClient, trainer: GrpcTrainer, **spec: Any) -> outcome_pb2.Outcome:
    completions = spec.pop("completions", trainer.url)
    run = client.run(messages=[{"role": "user", "content": "Go."}], completions=completions, tokenizer="t", **spec)
    async for _ in run:
        pass
    rollout = await client.get(run.uid, view="full")
    return rollout.outcome


def only(outcome: outcome_pb2.Outcome) -> TrainingSample:
    (sample,) = samples(outcome)
    return sample


async def test_only_what_is_new_travels_and_both_hold_the_same(
    client: AsyncClient, answer: list[int], toy: Any
) -> None:
    async with serving(GrpcTrainer(answer)) as trainer:
        outcome = await roll(client, trainer)
    assert (outcome.stop.reason, warned(outcome)) == ("stop", [])
    sample = only(outcome)
    held = [token for span in trainer.spans for token in span.token_ids]
    assert sample.prompt_ids + sample.response_ids == held
    assert sample.verified
    mask = [span.author == token_pb2.AUTHOR_MODEL for span in trainer.spans for _ in span.token_ids]
    assert sample.response_mask == [int(each) for each in mask[len(sample.prompt_ids) :]]
    first, *others = trainer.requests
    assert not first.HasField("base")
    assert first.origin.kind == token_pb2.SEGMENT_KIND_MAIN
    for number, request in enumerate(others):
        assert (request.base.messages, len(request.new_messages)) == (2 + 2 * number, 1)
        assert not request.HasField("origin")
        (span,) = request.new_tokens.spans
        said = f"\n<|im_start|>user\nAnd {number}?<|im_end|>\n<|im_start|>assistant\n"
        assert toy.decode(list(span.token_ids)) == said
        assert request.tools.digest == first.tools.digest
    assert len({request.turn_key for request in trainer.requests}) == TURNS


async def test_a_trainer_that_forgot_the_base_gets_the_whole_history_once(
    client: AsyncClient, answer: list[int]
) -> None:
    async with serving(GrpcTrainer(answer)) as trainer:

        def forget(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
            trainer.faults.append(BASE_UNKNOWN)

        trainer.lies[2] = forget
        outcome = await roll(client, trainer)
    assert outcome.stop.reason == "stop"
    refused, whole = trainer.requests[2:4]
    assert refused.turn_key == whole.turn_key
    assert not whole.HasField("base")
    assert len(whole.new_messages) == 5
    authors = [span.author for span in whole.new_tokens.spans]
    assert authors == [token_pb2.AUTHOR_OTHER, token_pb2.AUTHOR_MODEL] * 2 + [token_pb2.AUTHOR_OTHER]
    assert only(outcome).prompt_ids + only(outcome).response_ids == [t for s in trainer.spans for t in s.token_ids]


async def test_one_that_never_knows_a_base_is_not_asked_for_ever(client: AsyncClient, answer: list[int]) -> None:
    async with serving(GrpcTrainer(answer)) as trainer:

        def forget(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
            trainer.faults += [BASE_UNKNOWN] * 5

        trainer.lies[1] = forget
        outcome = await roll(client, trainer)
    assert [request.HasField("base") for request in trainer.requests] == [False, True, False]
    assert outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_TRAINER_CLIENT
    assert "turn 2: the trainer asks for the whole history, which it was sent" in outcome.failure.message


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED])
async def test_a_trainer_that_says_when_to_come_back_is_asked_again(
    client: AsyncClient, answer: list[int], code: grpc.StatusCode
) -> None:
    async with serving(GrpcTrainer(answer, faults=[Fault(code, details=(NOW,))] * 5)) as trainer:
        outcome = await roll(client, trainer)
    assert (outcome.stop.reason, warned(outcome)) == ("stop", [])
    assert len({request.turn_key for request in trainer.requests[:6]}) == 1
    assert outcome.metrics.completion_attempts == TURNS + 5


@pytest.mark.parametrize("replays", [True, False])
async def test_a_lost_turn_is_asked_for_again_only_where_keys_are_replayed(
    client: AsyncClient, answer: list[int], replays: bool
) -> None:
    async with serving(GrpcTrainer(answer, faults=[Fault(grpc.StatusCode.UNAVAILABLE)])) as trainer:
        target = {"url": trainer.url, "replays_turn_keys": replays}
        outcome = await roll(client, trainer, completions=target_of(**target))
    if replays:
        assert outcome.stop.reason == "stop"
        assert len(trainer.requests) == TURNS + 1
    else:
        assert outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_NETWORK
        assert "may have been generated" in outcome.failure.message
        assert len(trainer.requests) == 1


def target_of(url: str, replays_turn_keys: bool) -> Any:
    from rollout_client import Target

    return Target(url, replays_turn_keys=replays_turn_keys)


async def test_nobody_there_is_told_as_such(client: AsyncClient, answer: list[int]) -> None:
    async with serving(GrpcTrainer(answer)) as trainer:
        pass
    outcome = await roll(client, trainer, limits={"time": 20})
    assert outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_NETWORK
    assert "could not be reached" in outcome.failure.message


@pytest.mark.parametrize(
    ("code", "category"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, outcome_pb2.FAILURE_CATEGORY_TRAINER_CLIENT),
        (grpc.StatusCode.UNAUTHENTICATED, outcome_pb2.FAILURE_CATEGORY_TRAINER_CLIENT),
        (grpc.StatusCode.INTERNAL, outcome_pb2.FAILURE_CATEGORY_TRAINER_SERVER),
        (grpc.StatusCode.UNKNOWN, outcome_pb2.FAILURE_CATEGORY_TRAINER_SERVER),
    ],
)
async def test_other_statuses_end_the_rollout_in_the_trainers_words_without_its_key(
    client: AsyncClient, answer: list[int], code: grpc.StatusCode, category: int
) -> None:
    async with serving(GrpcTrainer(answer, faults=[Fault(code, "no: Bearer s3cr3t-s3cr3t", (info("X"),))])) as trainer:
        outcome = await roll(client, trainer, credentials={"completions_bearer": "s3cr3t-s3cr3t"})
    assert trainer.authorizations == ["Bearer s3cr3t-s3cr3t"]
    assert outcome.failure.category == category
    assert f"turn 1: the trainer answered {code.name}: no: Bearer [redacted]" in outcome.failure.message


def change_one(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
    response.token_ids[0] += 1


def drop_one(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
    del response.token_ids[-1]


def another_prompt(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
    response.prompt_checkpoint.digest = bytes(32)


def another_end(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
    response.after.tokens += 1


@pytest.mark.parametrize("lie", [change_one, drop_one, another_prompt, another_end])
@pytest.mark.parametrize("shows", [True, False])
async def test_a_lie_about_tokens_ends_the_rollout_on_its_turn(
    client: AsyncClient, answer: list[int], lie: Any, shows: bool
) -> None:
    async with (
        serving(GrpcTrainer(answer, lies={3: lie}, shows_ledger=shows)) as liar,
        serving(GrpcTrainer(answer)) as honest,
    ):
        outcome, other = await roll(client, liar), await roll(client, honest)
    assert (outcome.failure.category, outcome.failure.turn) == (DRIFT, 3)
    assert outcome.failure.message.startswith("turn 3: the trainer holds other tokens than this side")
    assert len(liar.requests) == 3
    if shows and lie in (change_one, drop_one):
        assert "since turn 3, from token" in outcome.failure.message
    assert ("ReadLedger" in outcome.failure.message) == (not shows)
    assert [span.turn for span in only(outcome).spans or () if span.trains] == [1, 2]  # the earlier, true turns stay
    assert other.stop.reason == "stop"


async def test_where_both_part_is_named_with_its_text(client: AsyncClient, answer: list[int]) -> None:
    async with serving(GrpcTrainer(answer)) as trainer:

        def swap(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
            trainer.spans[0].token_ids[3] = trainer.spans[0].token_ids[2]
            response.prompt_checkpoint.digest = bytes(32)

        trainer.lies[2] = swap
        outcome = await roll(client, trainer)
    assert "since turn 1, from token 3 on: here '" in outcome.failure.message
    assert "', there '" in outcome.failure.message


@pytest.mark.parametrize("field", ["prompt_checkpoint", "after"])
async def test_digests_that_are_missing_are_told_of(client: AsyncClient, answer: list[int], field: Any) -> None:
    def leave_out(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
        response.ClearField(field)

    async with serving(GrpcTrainer(answer, lies={2: leave_out})) as trainer:
        outcome = await roll(client, trainer)
    assert outcome.stop.reason == "stop"
    assert warned(outcome) == ["unverified"]
    assert f"sent no {field}" in outcome.warnings[0].message
    assert only(outcome).verified == (field == "after")


def shorten_logprobs(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
    del response.logprobs.values[-1]


def older_policy(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
    response.policy_version = {1: "v1", 2: "v2", 3: "v1", 4: "v2"}[request.turn]


async def test_what_is_odd_but_true_is_a_warning(client: AsyncClient, answer: list[int]) -> None:
    async with serving(GrpcTrainer(answer, lies={2: shorten_logprobs})) as trainer:
        short = await roll(client, trainer)
    assert warned(short) == ["logprobs_missing"]
    assert only(short).logprobs is None
    async with serving(GrpcTrainer(answer, lies=dict.fromkeys((1, 2, 3, 4), older_policy))) as trainer:
        stale = await roll(client, trainer)
    assert warned(stale) == ["policy_stale"]
    assert stale.warnings[0].turn == 3
    async with serving(GrpcTrainer(answer)) as trainer:
        long = await roll(client, trainer, sampling={"max_tokens": len(answer) - 1})
    assert warned(long) == ["length_exceeded"] * TURNS


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda _, response: response.ClearField("message"), "message: needs"),
        (
            lambda _, response: setattr(response.message, "json", '{"role": "user", "content": "x"}'),
            "its role is not",
        ),
        (lambda _, response: setattr(response.message, "json", "[]"), "a JSON object is needed"),
        (lambda _, response: response.token_ids.append(2**31), "token_ids: 2147483648 is not a token id"),
        (
            lambda _, response: (response.ClearField("token_ids"), response.ClearField("after")),
            "`token_ids` is missing",
        ),
    ],
)
async def test_an_answer_that_breaks_the_contract_is_named(
    client: AsyncClient, answer: list[int], change: Any, named: str
) -> None:
    async with serving(GrpcTrainer(answer, lies={2: change})) as trainer:
        outcome = await roll(client, trainer)
    assert outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_VALIDATION
    assert named in outcome.failure.message
    assert "turn 2" in outcome.failure.message


async def test_an_answer_that_was_cut_is_closed_by_a_token_that_does_not_train(
    client: AsyncClient, answer: list[int]
) -> None:
    def cut(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
        response.finish_reason = "length"

    async with serving(GrpcTrainer(answer[:-1], lies=dict.fromkeys(range(1, TURNS + 1), cut))) as trainer:
        outcome = await roll(client, trainer)
    assert outcome.stop.truncated
    closing = [span for span in only(outcome).spans or () if span.reason == "closing"]
    assert [span.stop - span.start for span in closing] == [1] * (TURNS - 1)
    assert [len(request.new_tokens.spans) for request in trainer.requests] == [1, 2, 2, 2]

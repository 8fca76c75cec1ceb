"""Edge cases of calls to a gRPC trainer: what may be retried, what is too large, and what proves a completion."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import outcome_pb2, token_pb2
from rollout_client import AsyncClient, Target, samples
from rollout_server.core.outcome import Category
from rollout_server.edge.grpc_channels import LARGEST_ANSWER, Channels
from rollout_server.edge.rpc.tls import ClientTls
from rollout_server.edge.targets.resolver import CheckedLookup
from rollout_server.edge.targets.rules import TargetRules
from rollout_server.edge.trainer.grpc_client import GrpcTrainerClient, Rejection, TurnCall, rejection_error
from rollout_server.edge.trainer.retry import RetryPolicy
from rollout_server.runtime.errors import RolloutFailed

from tests.support.grpc_trainer import BASE_UNKNOWN, Act, Fault, GrpcTrainer, info, serving
from tests.support.talking_agent import Talk, connected, noop

TURNS = 4
ANSWER = (56, 264, 13, 793)
TRAINER_OR_LIMIT = (
    outcome_pb2.FAILURE_CLASS_TRAINER,
    outcome_pb2.FAILURE_CLASS_DEADLINE,
    outcome_pb2.FAILURE_CLASS_POLICY,
)
SECRET = "s3cr3t-s3cr3t"
TOOLS_UNKNOWN = Fault(grpc.StatusCode.FAILED_PRECONDITION, "no tools", (info("TOOLS_UNKNOWN"),))


@pytest.fixture
async def client() -> AsyncIterator[AsyncClient]:
    async with connected(Talk(TURNS, noop)) as client:
        yield client


async def roll(client: AsyncClient, trainer: GrpcTrainer, *, replays: bool = False, **spec: Any) -> outcome_pb2.Outcome:
    fields = {"tokenizer": "t", "completions": Target(trainer.url, replays_turn_keys=replays), **spec}
    run = client.run(messages=[{"role": "user", "content": "Go."}], **fields)
    async for _ in run:
        pass
    outcome = (await client.get(run.uid, view="full")).outcome
    assert outcome.failure.failure_class in (outcome_pb2.FAILURE_CLASS_UNSPECIFIED, *TRAINER_OR_LIMIT)
    return outcome


def before_turn_three(trainer: GrpcTrainer, faults: Sequence[Fault]) -> None:
    def prepare(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
        trainer.faults += faults

    trainer.lies[2] = prepare


@pytest.mark.parametrize(
    ("faults", "attempts"),
    [
        ([TOOLS_UNKNOWN], [(True, True)]),
        ([TOOLS_UNKNOWN, BASE_UNKNOWN], [(True, True), (False, True)]),
        ([BASE_UNKNOWN], [(False, True)]),
    ],
)
async def test_what_a_trainer_lacks_is_sent_once(
    client: AsyncClient, faults: list[Fault], attempts: list[tuple[bool, bool]]
) -> None:
    async with serving(GrpcTrainer(ANSWER)) as trainer:
        before_turn_three(trainer, faults)
        outcome = await roll(client, trainer)
    assert outcome.stop.reason == "stop"
    again = [request for request in trainer.requests if request.turn == 3][1:]
    assert [(request.HasField("base"), bool(request.tools.tools)) for request in again] == attempts
    assert len({request.turn_key for request in trainer.requests if request.turn == 3}) == 1


async def test_one_that_never_knows_the_tools_is_told_so(client: AsyncClient) -> None:
    async with serving(GrpcTrainer(ANSWER)) as trainer:
        before_turn_three(trainer, [TOOLS_UNKNOWN] * 5)
        outcome = await roll(client, trainer)
    assert outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_TRAINER_CLIENT
    assert "turn 3: the trainer requests the list of tools, which was already sent" in outcome.failure.message
    assert [request.turn for request in trainer.requests] == [1, 2, 3, 3]


@pytest.mark.parametrize("replays", [True, False])
async def test_an_answer_that_is_too_large_is_not_generated_again(client: AsyncClient, replays: bool) -> None:
    def swell(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
        response.raw_text = "x" * LARGEST_ANSWER

    async with serving(GrpcTrainer(ANSWER, lies={1: swell})) as trainer:
        outcome = await roll(client, trainer, replays=replays)
    assert outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_VALIDATION
    assert f"responses of up to {LARGEST_ANSWER} bytes" in outcome.failure.message
    assert len(trainer.requests) == 1


async def test_an_answer_beyond_grpcs_own_limit_is_read(client: AsyncClient) -> None:
    def swell(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
        response.planes.add(name="routing", dtype="uint8", values=bytes(8 * 1024 * 1024))

    async with serving(GrpcTrainer(ANSWER, lies={1: swell})) as trainer:
        outcome = await roll(client, trainer)
    assert (outcome.failure.message, outcome.stop.reason) == ("", "stop")


async def test_a_trainer_that_wants_to_be_asked_after_the_end_is_not_asked(client: AsyncClient) -> None:
    later = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=3600))
    fault = Fault(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (later,))
    async with serving(GrpcTrainer(ANSWER, faults=[fault])) as trainer:
        outcome = await roll(client, trainer, limits={"time": 30})
    assert outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_RATE_LIMITED
    assert "defers the retry by 3600 s, which is longer than the rollout waits" in outcome.failure.message
    assert "may have been generated" not in outcome.failure.message
    assert len(trainer.requests) == 1


@pytest.mark.parametrize(("left", "blamed"), [(None, "trainer"), (3600.0, "trainer"), (0.0, "deadline")])
def test_a_call_that_the_rollouts_own_limit_ended_is_not_the_trainers_fault(left: float | None, blamed: str) -> None:
    late = Rejection(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
    failed = rejection_error(late, TurnCall(1, None if left is None else time.monotonic() + left))
    assert isinstance(failed, RolloutFailed)
    assert (failed.failure.category, failed.failure.failure_class.value) == (Category.TIMEOUT, blamed)


async def test_too_many_calls_are_the_models_fault(client: AsyncClient) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = json.dumps({"role": "assistant", "content": None, "tool_calls": [call] * 9})

    def overdo(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
        response.message.json = message

    async with serving(GrpcTrainer(ANSWER, lies={2: overdo})) as trainer:
        outcome = await roll(client, trainer, limits={"calls_per_turn": 1})
    assert outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_VALIDATION
    assert outcome.failure.failure_class == outcome_pb2.FAILURE_CLASS_POLICY
    assert [each.trainable for each in samples(outcome)] == [True]


async def test_a_target_that_the_rules_refuse_is_not_asked_again() -> None:
    lookup = CheckedLookup(TargetRules.parse("10.0.0.0/8"))
    channels = Channels(lookup, ClientTls())
    caller, call = GrpcTrainerClient(channels, "grpc://127.0.0.1:1", RetryPolicy(), 1.0, False), TurnCall(1, None)
    with pytest.raises(RolloutFailed) as failed:
        await caller.complete(pb.CompleteRequest(), call)
    assert (failed.value.failure.category, call.attempts) == (Category.VALIDATION, 1)
    assert "ROLLOUT_TARGETS do not allow" in failed.value.failure.message
    assert "check that it is running" not in failed.value.failure.message
    await lookup.close()


async def test_being_put_off_does_not_use_up_the_retries(client: AsyncClient) -> None:
    now = error_details_pb2.RetryInfo(retry_delay=Duration(nanos=1000))
    put_off = Fault(grpc.StatusCode.UNAVAILABLE, details=(now,))
    plain = Fault(grpc.StatusCode.RESOURCE_EXHAUSTED)
    async with serving(GrpcTrainer(ANSWER, faults=[*[put_off] * 4, plain, plain])) as trainer:
        outcome = await roll(client, trainer)
    assert outcome.stop.reason == "stop"
    assert outcome.metrics.completion_attempts == TURNS + 6


def no_proof(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
    response.ClearField("prompt_checkpoint")
    response.ClearField("after")


def no_ids(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
    response.ClearField("token_ids")


def long_version(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
    response.policy_version = "v" * 300


@pytest.mark.parametrize(
    ("lie", "named"),
    [
        (no_proof, "so the trainer's prompt cannot be verified"),
        (no_ids, "`token_ids` is missing"),
        (long_version, "policy_version: has 300 characters"),
    ],
)
async def test_an_answer_that_cannot_be_taken_is_named(client: AsyncClient, lie: Act, named: str) -> None:
    async with serving(GrpcTrainer(ANSWER, lies={2: lie})) as trainer:
        outcome = await roll(client, trainer)
    assert (outcome.failure.category, outcome.failure.turn) == (outcome_pb2.FAILURE_CATEGORY_VALIDATION, 2)
    assert named in outcome.failure.message
    assert {span.turn for span in samples(outcome)[0].spans or ()} == {1}


@pytest.mark.parametrize("honest", [True, False])
async def test_a_prompt_that_comes_as_ids_is_compared_too(client: AsyncClient, honest: bool) -> None:
    async with serving(GrpcTrainer(ANSWER)) as trainer:

        def show(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
            prompt = [token for span in trainer.spans[:-1] for token in span.token_ids]
            response.prompt_ids.values.extend(prompt if honest else prompt[:-1])

        trainer.lies[2] = show
        outcome = await roll(client, trainer)
    if honest:
        assert outcome.stop.reason == "stop"
        assert samples(outcome)[0].verified
    else:
        assert (outcome.failure.category, outcome.failure.turn) == (outcome_pb2.FAILURE_CATEGORY_TOKEN_DRIFT, 2)


async def test_an_answer_of_no_tokens_is_one(client: AsyncClient) -> None:
    async with serving(GrpcTrainer(())) as trainer:
        outcome = await roll(client, trainer)
    assert (outcome.failure.message, outcome.stop.reason) == ("", "stop")
    assert outcome.metrics.generated_tokens == 0


async def test_the_key_is_not_repeated_as_a_policy(client: AsyncClient) -> None:
    def name(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
        response.policy_version = SECRET if request.turn % 2 else "v2"

    async with serving(GrpcTrainer(ANSWER, lies=dict.fromkeys((1, 2, 3), name))) as trainer:
        outcome = await roll(client, trainer, credentials={"completions_bearer": SECRET})
    (warning,) = [each for each in outcome.warnings if each.code == "policy_stale"]
    assert SECRET not in warning.message
    assert "[redacted]" in warning.message


async def test_cancelling_a_rollout_cancels_its_call(client: AsyncClient) -> None:
    async with serving(GrpcTrainer(ANSWER, silent=True)) as trainer:
        run = client.run(
            messages=[{"role": "user", "content": "Go."}], completions=trainer.url, tokenizer="t", rollout_id="x"
        )
        listening = asyncio.create_task(listen(run))
        await asyncio.wait_for(trainer.asked.wait(), 20)
        await client.cancel(run.uid)
        await asyncio.wait_for(trainer.left.wait(), 20)
        await listening
    outcome = (await client.get(run.uid, view="full")).outcome
    assert outcome.WhichOneof("end") == "cancellation"
    assert not outcome.samples


async def listen(run: Any) -> None:
    async for _ in run:
        pass


async def test_one_that_forgot_who_wrote_what_is_agreed_with_from_there_on(client: AsyncClient) -> None:
    """A trainer that renders receives no authors. After it lost its record, its whole prompt counts as not generated."""
    seen: list[int] = []
    async with serving(GrpcTrainer(ANSWER)) as trainer:

        def render(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
            del trainer.spans[-1]
            fresh = [1000 + request.turn]
            shown = fresh if request.HasField("base") else [*seen, *fresh]
            trainer.spans.append(token_pb2.Span(author="AUTHOR_OTHER", turn=request.turn, token_ids=shown))
            response.prompt_ids.values.extend([*seen, *fresh])
            trainer.spans.append(token_pb2.Span(author="AUTHOR_MODEL", turn=request.turn, token_ids=ANSWER))
            response.after.CopyFrom(trainer.checkpoint())
            seen.extend([*fresh, *ANSWER])
            if request.turn == 2:
                trainer.faults.append(BASE_UNKNOWN)

        trainer.lies |= dict.fromkeys(range(1, TURNS + 1), render)
        outcome = await roll(client, trainer, tokenizer=None)
    assert (outcome.failure.message, outcome.stop.reason) == ("", "stop")
    (sample,) = samples(outcome)
    assert sample.response_mask == [1] * 4 + ([0] + [1] * 4) * (TURNS - 1)
    bases = [request.base.digest for request in trainer.requests if request.turn == TURNS]
    assert len(bases) == 1

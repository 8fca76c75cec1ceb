"""Completions that the trainer aborts are resumed from their tokens: over both transports, in both modes."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import message_pb2, outcome_pb2, spec_pb2, token_pb2
from rollout_client import AsyncClient, samples
from rollout_server.app import Server
from rollout_server.edge.trainer import aborted_parts
from rollout_server.testing.script import Script, ScriptedReply
from rollout_server.testing.trainer import StrictTrainer

from tests.edge.trainer.grpc.test_planes import plane
from tests.edge.trainer.grpc.test_streams import adding, played, server, start
from tests.edge.trainer.grpc.test_token_mode import answer, client, roll, toy
from tests.support.grpc_trainer import BASE_UNKNOWN, GrpcTrainer, serving
from tests.support.talking_agent import equal, warned

__all__ = ["answer", "client", "server", "toy"]
every_way = pytest.mark.parametrize(("mode", "stream"), list(product(("tokens", "messages"), (True, False))))


async def rolled(
    server: Server, script: Script, mode: str = "tokens", *, stream: bool = True, **spec: Any
) -> tuple[outcome_pb2.Outcome, list[pb.CompleteRequest]]:
    """Run a rollout of the strict trainer, and check its only sample against the trainer's own."""
    address, request = f"127.0.0.1:{server.grpc_port}", start("r", mode, **spec)
    async with StrictTrainer(script=script) as trainer, AsyncClient(address) as client:
        if stream:
            async with trainer.connected(address) as connected:
                outcome = await played(connected, request)
        else:
            request.spec.completions.url = f"grpc://{trainer.grpc_target}"
            async for _ in (run := client.run(request.spec)):
                pass
            outcome = (await client.get(run.uid, view="samples")).outcome
        verdict = trainer.verdict("r")
        asked = [seen.request for seen in trainer.completions]
    assert verdict is not None
    assert (outcome.failure.message, verdict.refusals) == ("", ())
    (sample,) = samples(outcome)
    assert equal(sample, verdict.sample)
    return outcome, asked


def written(outcome: outcome_pb2.Outcome) -> list[tuple[int, str, int | None, int]]:
    """Turn, version, step and number of tokens of each span of the model."""
    (sample,) = outcome.samples
    return [
        (s.turn, s.policy_version, s.policy_step if s.HasField("policy_step") else None, s.stop - s.start)
        for s in sample.spans
        if s.author == token_pb2.AUTHOR_MODEL
    ]


@every_way
async def test_each_policy_of_a_completion_has_a_span(server: Server, mode: str, stream: bool) -> None:
    lines = (
        adding(1, policy_version="a", policy_step=4),
        adding(2, policy_version="b", policy_step=5, aborts=(3, 0, 2)),
        ScriptedReply(content="Done.", policy_version="c", aborts=(0,)),
    )
    outcome, asked = await rolled(server, Script(lines=lines), mode, stream=stream)
    assert (outcome.stop.reason, warned(outcome), outcome.policy_step) == ("stop", [], 8)
    spans = written(outcome)
    assert [span[:3] for span in spans] == [(1, "a", 4), (2, "b", 5), (2, "b+2", 7), (2, "b+3", 8), (3, "c+1", None)]
    assert [span[3] for span in spans[1:3]] == [3, 2]
    keys = [request.turn_key.removeprefix(asked[0].uid) for request in asked]
    assert keys == ["/0/1", "/0/2", "/0/2/1", "/0/2/2", "/0/2/3", "/0/3", "/0/3/1"]
    assert [sum(len(span.token_ids) for span in request.resumed) for request in asked] == [0, 0, 3, 3, 5, 0, 0]
    resumed = asked[4].resumed
    assert [(span.policy_version, span.policy_step, len(span.logprobs.values)) for span in resumed] == [
        ("b", 5, 3),
        ("b+2", 7, 2),
    ]
    assert (outcome.metrics.turns, outcome.metrics.completion_attempts) == (3, 7)


@every_way
async def test_max_tokens_is_what_is_left_and_parts_that_reach_it_end_the_turn(
    server: Server, mode: str, stream: bool
) -> None:
    lines = (ScriptedReply(content="One two three four.", cut=True, aborts=(2, 99)),)
    sampling = spec_pb2.Sampling(max_tokens=4 if mode == "tokens" else 99)
    outcome, asked = await rolled(server, Script(lines=lines), mode, stream=stream, sampling=sampling)
    assert [request.sampling.max_tokens for request in asked][:2] == [sampling.max_tokens, sampling.max_tokens - 2]
    assert [span[0] for span in written(outcome)] == [1] * len(written(outcome))
    if mode == "tokens":
        assert (outcome.stop.truncated, len(asked)) == (True, 2)


def aborting(*parts: dict[str, Any]) -> dict[int, Any]:
    """Lies that abort turn 1: a response per part with its number of tokens and other fields, and then the rest."""
    left = list(parts)

    def abort(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
        part = left.pop(0) if left else {"finish_reason": "stop"}
        start = sum(len(span.token_ids) for span in request.resumed)
        stop = start + part.pop("count", len(response.token_ids))
        del response.token_ids[stop:], response.token_ids[:start]
        del response.logprobs.values[stop:], response.logprobs.values[:start]
        for name in part.pop("without", ()):
            response.ClearField(name)
        response.MergeFrom(pb.CompleteResponse(**{"finish_reason": "abort", **part}))

    return {1: abort}


BARE = ("message", "after", "prompt_checkpoint")


async def test_planes_are_joined_if_all_parts_have_the_same(client: AsyncClient, answer: list[int]) -> None:
    rest = len(answer) - 1
    for other in ("a", "b"):
        first: dict[str, Any] = {"count": 1, "without": BARE, "planes": [plane("a", "uint8", b"x")]}
        second = {"planes": [plane(other, "uint8", b"y" * rest)], "finish_reason": "stop"}
        async with serving(GrpcTrainer(answer, lies=aborting(first, second))) as trainer:
            outcome = await roll(client, trainer)
        spans = [span for span in outcome.segments[0].spans if span.turn == 1 and not span.mask_reason]
        assert [span.token_ids for span in spans] == [answer], "one policy wrote both parts"
        assert [each.values for each in spans[0].planes] == ([b"x" + b"y" * rest] if other == "a" else [])
        assert warned(outcome) == ([] if other == "a" else ["planes_dropped"])


async def test_without_the_logprobs_of_a_part_those_of_the_turn_are_unknown(
    client: AsyncClient, answer: list[int]
) -> None:
    parts = [{"count": 1, "without": (*BARE, "logprobs")}, {"finish_reason": "stop"}]
    async with serving(GrpcTrainer(answer, lies=aborting(*parts))) as trainer:
        outcome = await roll(client, trainer)
    assert (outcome.stop.reason, warned(outcome)) == ("stop", ["logprobs_missing"])
    assert samples(outcome)[0].logprobs is None


async def test_a_trainer_that_aborts_for_ever_fails_the_rollout(client: AsyncClient, answer: list[int]) -> None:
    parts = [{"count": 0, "token_ids": [5], "without": BARE} for _ in range(99)]
    async with serving(GrpcTrainer(answer, lies=aborting(*parts))) as trainer:
        outcome = await roll(client, trainer)
    assert outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_TRAINER_SERVER
    assert outcome.failure.failure_class == outcome_pb2.FAILURE_CLASS_TRAINER
    assert "turn 1: the completion was aborted 64 times" in outcome.failure.message
    assert len(trainer.requests) == aborted_parts.MOST_PARTS


async def test_a_restarted_trainer_gets_the_history_and_the_parts(client: AsyncClient, answer: list[int]) -> None:
    async with serving(GrpcTrainer(answer)) as trainer:

        def forget(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
            if not request.resumed:
                for name in BARE:
                    response.ClearField(name)
                del response.token_ids[1:], response.logprobs.values[1:]
                response.finish_reason = "abort"
                trainer.faults.append(BASE_UNKNOWN)
            else:
                del response.token_ids[:1], response.logprobs.values[:1]

        trainer.lies[2] = forget
        outcome = await roll(client, trainer)
    assert (outcome.failure.message, outcome.stop.reason, warned(outcome)) == ("", "stop", [])
    keys = [request.turn_key[-3:] for request in trainer.requests[1:4]]
    assert keys == ["0/2", "2/1", "2/1"]
    assert [request.HasField("base") for request in trainer.requests[1:4]] == [True, True, False]
    assert [len(request.resumed) for request in trainer.requests[1:4]] == [0, 1, 1]


async def test_parts_with_max_tokens_need_no_message_if_the_server_can_decode(
    client: AsyncClient, answer: list[int], toy: Any
) -> None:
    for mode in ("tokens", "messages"):
        async with serving(
            GrpcTrainer(answer, lies=aborting({"count": 1, "without": BARE}, {"without": BARE}))
        ) as trainer:
            limit = {"sampling": {"max_tokens": len(answer)}, "limits": {"turns": 1}}
            outcome = await roll(client, trainer, token_mode=mode, **limit)
        if mode == "tokens":
            assert (outcome.failure.message, outcome.stop.truncated) == ("", True)
            assert toy.decode(answer) in outcome.messages[1].json
            assert warned(outcome) == ["unverified"]
        else:
            assert "message: is missing" in outcome.failure.message
            assert outcome.failure.failure_class == outcome_pb2.FAILURE_CLASS_TRAINER


async def test_in_token_mode_parts_with_max_tokens_have_the_text_of_all_parts(
    client: AsyncClient, answer: list[int], toy: Any
) -> None:
    """A message beside the last part may be of that part alone, or of what the trainer would have generated."""
    said = message_pb2.Message(json='{"role": "assistant", "content": "I was interrupted."}')
    last = {"without": BARE, "message": said}
    for mode in ("tokens", "messages"):
        async with serving(GrpcTrainer(answer, lies=aborting({"count": 1, "without": BARE}, dict(last)))) as trainer:
            limit = {"sampling": {"max_tokens": len(answer)}, "limits": {"turns": 1}}
            outcome = await roll(client, trainer, token_mode=mode, **limit)
        assert (outcome.failure.message, outcome.stop.truncated) == ("", True)
        assert (toy.decode(answer) in outcome.messages[1].json) is (mode == "tokens")
        assert ("I was interrupted." in outcome.messages[1].json) is (mode == "messages")


@pytest.mark.parametrize("step", [-1, -(2**63)])
async def test_a_negative_step_is_refused_by_name(client: AsyncClient, answer: list[int], step: int) -> None:
    for finish in ("stop", "abort"):
        lies = aborting({"finish_reason": finish, "policy_step": step})
        async with serving(GrpcTrainer(answer, lies=lies)) as trainer:
            outcome = await roll(client, trainer)
        assert f"policy_step: is {step}; steps are 0 or more" in outcome.failure.message


@pytest.mark.parametrize(
    "action", [spec_pb2.STALE_ACTION_MASK, spec_pb2.STALE_ACTION_SPLIT, spec_pb2.STALE_ACTION_KEEP]
)
async def test_stale_tokens_reach_the_samples_by_their_action(server: Server, action: spec_pb2.StaleAction) -> None:
    lines = (
        adding(1, policy_step=1),
        adding(2, policy_step=7, aborts=(3,)),
        ScriptedReply(content="Done.", policy_step=9),
    )
    staleness = spec_pb2.Staleness(max_lag=1, action=action)
    address = f"127.0.0.1:{server.grpc_port}"
    async with StrictTrainer(script=Script(lines=lines)) as trainer, trainer.connected(address) as stream:
        (uid,) = await stream.start(start("r", staleness=staleness))
        outcome = (await stream.outcome(uid)).outcome
        async with AsyncClient(address) as client:
            rollout = await client.get(uid, view="full")
            told = [each.answered async for each in client.watch(uid) if each.HasField("answered")]
    assert rollout.spec.staleness == staleness
    assert (outcome.failure.message, outcome.policy_step) == ("", 9)
    assert [answered.policy_step for answered in told] == [1, 8, 9]
    spans = [span for span in rollout.outcome.segments[0].spans if span.author == token_pb2.AUTHOR_MODEL]
    assert [span.policy_step for span in spans] == [1, 7, 8, 9]
    counts = [len(span.token_ids) for span in spans]
    stale = action == spec_pb2.STALE_ACTION_MASK
    assert [span.mask_reason == token_pb2.MASK_REASON_STALE for span in spans] == [stale, stale, False, False]
    trained = [sum(sample.response_mask) for sample in outcome.samples]
    fresh, old = sum(counts[2:]), sum(counts[:2])
    assert (
        trained
        == {
            spec_pb2.STALE_ACTION_MASK: [fresh],
            spec_pb2.STALE_ACTION_SPLIT: [old, fresh],
            spec_pb2.STALE_ACTION_KEEP: [old + fresh],
        }[action]
    )
    verdicts = [(sample.part, sample.trainable, sample.untrainable_reason) for sample in outcome.samples]
    split = [(0, False, "stale"), (1, True, "")]
    assert verdicts == (split if action == spec_pb2.STALE_ACTION_SPLIT else [(0, True, "")])
    if action == spec_pb2.STALE_ACTION_SPLIT:
        first, second = outcome.samples
        ids = [token for span in rollout.outcome.segments[0].spans for token in span.token_ids]
        assert [*second.prompt_ids, *second.response_ids] == ids
        assert [*first.prompt_ids, *first.response_ids] == list(second.prompt_ids)
        assert (second.spans[0].mask_reason, second.spans[0].stop) == (
            token_pb2.MASK_REASON_PROMPT,
            len(second.prompt_ids),
        )
        assert not first.HasField("reward")

"""Token mode: the server renders; engines generate from ids and parse the message; sampled text is never tokenized again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from osmosis.rollout.v1 import outcome_pb2
from rollout_client import AsyncClient, NotPossible, samples

from tests.edge.engine.rolling import CALL, DONE, SQUEEZED, THOUGHT, TWO_CALLS, check_whole, only, roll, warned
from tests.support.engine_model import EngineModel
from tests.support.engines import Engine, OpenaiEngine, SglangEngine, VllmEngine, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
both = pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
Kind = Callable[[EngineModel], Engine]
TOKENS: dict[str, Any] = {"token_mode": "tokens", "tokenizer": "t"}
GENERATE, DERENDER = "/inference/v1/generate", "/v1/chat/completions/derender"


@both
@pytest.mark.parametrize("odd", [False, True])
async def test_samples_are_what_the_engine_was_sent_and_wrote(client: AsyncClient, kind: Kind, odd: bool) -> None:
    engine = kind(EngineModel([SQUEEZED, TWO_CALLS, THOUGHT, DONE], odd=odd))
    async with serving(engine):
        outcome = await roll(client, engine, **TOKENS)
    assert (outcome.stop.reason, warned(outcome)) == ("stop", [])
    sample = only(outcome)
    check_whole(sample, engine.model.seen)
    assert sample.verified
    assert len(engine.model.seen) == 4
    assert outcome.metrics.tool_calls == 4


@both
async def test_the_first_prompt_is_the_one_that_the_engine_would_render(client: AsyncClient, kind: Kind) -> None:
    engine = kind(EngineModel([CALL, DONE]))
    async with serving(engine):
        await roll(client, engine, **TOKENS)
    chat = engine.bodies(DERENDER)[0]["chat_request"] if kind is VllmEngine else engine.bodies()[0]
    assert engine.model.seen[0].prompt == engine.model.render(chat["messages"], chat["tools"], {})


async def test_vllm_generates_from_ids_and_reads_the_message_in_them(client: AsyncClient) -> None:
    engine = VllmEngine(EngineModel([CALL, DONE]))
    sampling: Any = {"temperature": 0.5, "max_tokens": 64, "stop": ["x"], "extra": {"top_k": 3}}
    async with serving(engine):
        outcome = await roll(client, engine, sampling=sampling, **TOKENS)
    assert [path for path, _ in engine.requests] == [GENERATE, DERENDER] * 2
    generate = engine.bodies(GENERATE)[1]
    parameters = {"temperature": 0.5, "max_tokens": 64, "stop": ["x"], "top_k": 3, "logprobs": 0}
    assert generate["sampling_params"] == parameters
    assert (generate["model"], generate["return_token_ids"]) == ("toy-model", True)
    assert generate["token_ids"] == engine.model.seen[1].prompt
    derender = engine.bodies(DERENDER)[1]
    assert derender["prompt_tokens"] == len(generate["token_ids"])
    assert derender["prompt_token_ids"] == generate["token_ids"][-64:]
    assert derender["generate_response"]["choices"][0]["token_ids"] == engine.model.seen[1].ids
    assert len(derender["chat_request"]["messages"]) == 3
    assert outcome.metrics.completion_attempts == 4


async def test_sglang_is_sent_messages_for_its_parsers_and_ids_to_generate_from(client: AsyncClient) -> None:
    engine = SglangEngine(EngineModel([CALL, DONE]))
    async with serving(engine):
        await roll(client, engine, **TOKENS)
    bodies = engine.bodies()
    assert [body["input_ids"] for body in bodies] == [turn.prompt for turn in engine.model.seen]
    assert [len(body["messages"]) for body in bodies] == [1, 3]


@both
async def test_a_cut_answer_is_closed_before_the_next_turn(client: AsyncClient, kind: Kind) -> None:
    engine = kind(EngineModel([CALL, "A long answer that goes on and on", DONE]))
    length = len(engine.model.encode(CALL)) + 1
    async with serving(engine):
        outcome = await roll(client, engine, sampling={"max_tokens": length}, **TOKENS)
    check_whole(only(outcome), engine.model.seen)


async def test_an_older_vllm_does_not_repeat_the_prompt(client: AsyncClient) -> None:
    engine = VllmEngine(EngineModel([CALL, DONE]))
    engine.spoil = lambda answer: answer.pop("prompt_token_ids")
    async with serving(engine):
        outcome = await roll(client, engine, **TOKENS)
    assert warned(outcome) == ["unverified", "unverified"]
    sample = only(outcome)
    check_whole(sample, engine.model.seen)
    assert not sample.verified


@both
async def test_an_engine_that_generates_from_other_ids_drifts(client: AsyncClient, kind: Kind) -> None:
    engine = kind(EngineModel([CALL, DONE]))

    def lie(answer: dict[str, Any]) -> None:
        if len(engine.model.seen) == 2:
            told = answer["choices"][0] if kind is SglangEngine else answer
            told["prompt_token_ids"] = told["prompt_token_ids"][3:]

    engine.spoil = lie
    async with serving(engine):
        outcome = await roll(client, engine, **TOKENS)
    assert warned(outcome) == ["token_drift"]
    first, second = samples(outcome)
    check_whole(first, engine.model.seen[:1])
    assert second.prompt_ids == engine.model.seen[1].prompt[3:]


async def test_vllm_without_its_token_routes_is_told_how_to_serve_them(client: AsyncClient) -> None:
    engine = VllmEngine(EngineModel([DONE]))
    plain = Engine(engine.model)
    plain.chat = engine.chat  # type: ignore[method-assign]
    async with serving(plain):
        outcome = await roll(client, engine, completions={"url": plain.url, "dialect": "vllm", "model": "m"}, **TOKENS)
    assert outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_ENGINE_CLIENT
    assert "--enable-scale-out" in outcome.failure.message


async def test_no_ids_in_the_answer_end_the_rollout(client: AsyncClient) -> None:
    engine = SglangEngine(EngineModel([DONE]))
    engine.young = False  # type: ignore[misc]
    async with serving(engine):
        outcome = await roll(client, engine, sampling={"logprobs": False}, **TOKENS)
    assert outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_VALIDATION
    assert "0.5.13" in outcome.failure.message


async def test_a_general_endpoint_takes_no_ids(client: AsyncClient) -> None:
    engine = OpenaiEngine(EngineModel([DONE]))
    async with serving(engine):
        with pytest.raises(NotPossible, match="VLLM or SGLANG"):
            await roll(client, engine, **TOKENS)
    assert engine.requests == []


async def test_vllm_continues_a_completion_that_it_aborted(client: AsyncClient) -> None:
    engine = VllmEngine(EngineModel([DONE], aborts=2))
    part = engine.model.encode("Hal")
    async with serving(engine):
        outcome = await roll(client, engine, sampling={"max_tokens": 64}, **TOKENS)
    assert (outcome.stop.reason, warned(outcome)) == ("stop", [])
    (last,) = engine.model.seen
    bodies = engine.bodies(GENERATE)
    prompt = bodies[0]["token_ids"]
    assert (
        [body["token_ids"] for body in bodies]
        == [prompt, prompt + part, prompt + part * 2]
        == [
            *(body["token_ids"] for body in bodies[:2]),
            last.prompt,
        ]
    )
    assert [body["sampling_params"]["max_tokens"] for body in bodies] == [64 - n * len(part) for n in range(3)]
    sample = only(outcome)
    assert (sample.prompt_ids, sample.response_ids) == (prompt, part * 2 + last.ids)
    assert sample.logprobs == [*([-1.0] * 2 * len(part)), *last.logprobs]
    assert sample.verified
    (derender,) = engine.bodies(DERENDER)
    (choice,) = derender["generate_response"]["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (sample.response_ids, "stop")
    assert not derender["chat_request"].get("logprobs")
    assert '"content": "HalHal#### 8"' in outcome.messages[-1].json
    assert (outcome.metrics.turns, outcome.metrics.completion_attempts) == (1, 4)


@pytest.mark.parametrize("nulls", [{0}, {1}, {0, 1}])
async def test_an_aborted_part_of_vllm_whose_tokens_are_null_has_none(client: AsyncClient, nulls: set[int]) -> None:
    """As when the weights are updated before the first token, or before the first one after a part."""
    engine = VllmEngine(EngineModel([DONE], aborts=2))
    part = engine.model.encode("Hal")

    def spoil(answer: dict[str, Any]) -> None:
        if len(engine.bodies(GENERATE)) - 1 in nulls:
            answer["choices"][0] |= {"token_ids": None, "logprobs": None}

    engine.spoil = spoil
    async with serving(engine):
        outcome = await roll(client, engine, **TOKENS)
    assert (outcome.failure.message, outcome.stop.reason, warned(outcome)) == ("", "stop", [])
    (last,) = engine.model.seen
    assert only(outcome).response_ids == part * (2 - len(nulls)) + last.ids


async def test_parts_of_vllm_that_reach_max_tokens_end_the_turn(client: AsyncClient) -> None:
    engine = VllmEngine(EngineModel([DONE], aborts=99))
    part = engine.model.encode("Hal")
    async with serving(engine):
        outcome = await roll(client, engine, sampling={"max_tokens": 2 * len(part)}, **TOKENS)
    assert (outcome.failure.message, outcome.stop.truncated) == ("", True)
    assert only(outcome).response_ids == part * 2


async def test_a_vllm_that_aborts_for_ever_fails_the_rollout(client: AsyncClient) -> None:
    engine = VllmEngine(EngineModel([DONE], aborts=99))
    async with serving(engine):
        outcome = await roll(client, engine, **TOKENS)
    assert outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_ENGINE_SERVER
    assert "the completion was aborted 64 times" in outcome.failure.message


async def test_a_vllm_that_generates_after_other_tokens_than_the_aborted_ones_is_refused(client: AsyncClient) -> None:
    engine = VllmEngine(EngineModel([DONE], aborts=1))

    def forget(answer: dict[str, Any]) -> None:
        if engine.model.seen:
            del answer["prompt_token_ids"][-1]

    engine.spoil = forget
    async with serving(engine):
        outcome = await roll(client, engine, **TOKENS)
    assert "`prompt_token_ids` are not the prompt and the tokens that were aborted" in outcome.failure.message


async def test_sglang_is_asked_for_the_whole_turn_again(client: AsyncClient) -> None:
    """Its parsers read what one request generated, so the parts would have no message."""
    engine = SglangEngine(EngineModel([DONE], aborts=2))
    async with serving(engine):
        outcome = await roll(client, engine, **TOKENS)
    assert (outcome.stop.reason, warned(outcome)) == ("stop", [])
    check_whole(only(outcome), engine.model.seen)
    assert outcome.metrics.completion_attempts == 3


@pytest.mark.parametrize(
    ("version", "step"),
    [
        ("12", 12),
        ("0", 0),
        (str(2**63 - 1), 2**63 - 1),
        (str(2**63), None),
        ("9" * 40, None),
        ("step-7", None),
        ("007", None),
        ("-1", None),
    ],
)
async def test_a_version_that_is_a_whole_number_is_a_step(client: AsyncClient, version: str, step: int | None) -> None:
    engine = SglangEngine(EngineModel([DONE]))
    engine.spoil = lambda answer: answer.update(metadata={"weight_version": version})
    async with serving(engine):
        outcome = await roll(client, engine, **TOKENS)
    (span,) = [span for span in outcome.samples[0].spans if not span.mask_reason]
    assert (span.policy_version, span.policy_step if span.HasField("policy_step") else None) == (version, step)
    assert outcome.HasField("policy_step") is (step is not None)

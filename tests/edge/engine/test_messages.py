"""Message mode: the engine renders, and samples consist of the ids that it reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from osmosis.rollout.v1 import outcome_pb2, token_pb2
from rollout_client import AsyncClient, samples

from tests.edge.engine.rolling import (
    CALL,
    DONE,
    SQUEEZED,
    THOUGHT,
    TWO_CALLS,
    check_whole,
    only,
    roll,
    target,
    warned,
)
from tests.support.engine_model import EngineModel
from tests.support.engines import Engine, OpenaiEngine, SglangEngine, VllmEngine, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
both = pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
every = pytest.mark.parametrize("kind", [VllmEngine, SglangEngine, OpenaiEngine])
Kind = Callable[[EngineModel], Engine]


@both
@pytest.mark.parametrize("tokenizer", [None, "t"])
async def test_samples_are_what_the_engine_saw_and_wrote(
    client: AsyncClient, kind: Kind, tokenizer: str | None
) -> None:
    engine = kind(EngineModel([CALL, TWO_CALLS, THOUGHT, DONE]))
    async with serving(engine):
        outcome = await roll(client, engine, tokenizer=tokenizer)
    assert (outcome.stop.reason, warned(outcome)) == ("stop", [])
    sample = only(outcome)
    check_whole(sample, engine.model.seen)
    assert sample.verified
    assert len(engine.model.seen) == 4
    assert outcome.metrics.tool_calls == 4
    assert outcome.metrics.generated_tokens == sum(len(turn.ids) for turn in engine.model.seen)


@every
async def test_the_conversation_holds_calls_thoughts_and_results(client: AsyncClient, kind: Kind) -> None:
    engine = kind(EngineModel([THOUGHT, TWO_CALLS, DONE]))
    async with serving(engine):
        outcome = await roll(client, engine)
    last = engine.bodies()[-1]["messages"]
    assert [message["role"] for message in last] == ["user", "assistant", "tool", "assistant", "tool", "tool"]
    assert [message["content"] for message in last if message["role"] == "tool"] == ["8", "8", "8"]
    ids = [call["id"] for message in last for call in message.get("tool_calls") or ()]
    assert [message["tool_call_id"] for message in last if message["role"] == "tool"] == ids
    if not isinstance(engine, OpenaiEngine):
        thought = last[1].get("reasoning_content") or last[1].get("reasoning")
        assert thought == "Five and three."
        assert last[1]["content"] in (None, "")
    assert outcome.stop.reason == "stop"


@every
async def test_what_is_sent(client: AsyncClient, kind: Kind) -> None:
    engine = kind(EngineModel([DONE]))
    sampling: Any = {"temperature": 0, "top_p": 0.5, "max_tokens": 64, "stop": ["x"], "extra": {"seed": 3, "n": 4}}
    async with serving(engine):
        outcome = await roll(
            client, engine, sampling=sampling, credentials={"completions_bearer": "hush"}, labels={"a": "b"}
        )
    assert outcome.stop.reason == "stop"
    (body,) = engine.bodies()
    (headers,) = engine.headers
    assert headers["Authorization"] == "Bearer hush"
    assert body["messages"] == [{"role": "user", "content": "5 plus 3?"}]
    assert [tool["function"]["name"] for tool in body["tools"]] == ["add", "multiply"]
    asked = {"model": "toy-model", "temperature": 0, "top_p": 0.5, "max_tokens": 64, "stop": ["x"], "seed": 3}
    assert {key: body[key] for key in asked} == asked
    added = set(body) - set(asked) - {"messages", "tools"}
    assert added == {
        OpenaiEngine: set[str](),
        VllmEngine: {"return_token_ids", "logprobs"},
        SglangEngine: {"return_token_ids", "return_prompt_token_ids", "return_meta_info", "logprobs"},
    }.get(type(engine))


async def test_an_endpoint_without_ids_plays_the_rollout_and_counts_what_it_used(client: AsyncClient) -> None:
    engine = OpenaiEngine(EngineModel([CALL, DONE]))
    async with serving(engine):
        outcome = await roll(client, engine)
    assert (outcome.stop.reason, outcome.metrics.turns) == ("stop", 2)
    assert samples(outcome) == []
    assert outcome.metrics.generated_tokens == sum(len(turn.ids) for turn in engine.model.seen)
    assert outcome.metrics.prompt_tokens == sum(len(turn.prompt) for turn in engine.model.seen)


async def test_an_openai_endpoint_that_reports_ids_is_believed(client: AsyncClient) -> None:
    engine = VllmEngine(EngineModel([CALL, DONE]))
    async with serving(engine):
        completions = target(engine, dialect="openai")
        extra = {"return_token_ids": True, "logprobs": True}
        outcome = await roll(client, engine, completions=completions, sampling={"extra": extra})
    check_whole(only(outcome), engine.model.seen)


@pytest.mark.parametrize("reasons", [False, True])
async def test_the_limit_has_the_name_that_the_model_takes(client: AsyncClient, reasons: bool) -> None:
    engine = OpenaiEngine(EngineModel([CALL, DONE]))
    engine.reasons = reasons  # type: ignore[misc]
    async with serving(engine):
        for _ in range(2):
            outcome = await roll(client, engine, sampling={"max_tokens": 100})
            assert outcome.stop.reason == "stop"
    names = [name for body in engine.bodies() for name in ("max_tokens", "max_completion_tokens") if name in body]
    # The first request finds out, without generating anything, and later rollouts know.
    assert names == (["max_tokens", *["max_completion_tokens"] * 3] if reasons else ["max_tokens"] * 3)


@both
async def test_history_that_the_engine_tokenises_otherwise_is_drift(client: AsyncClient, kind: Kind) -> None:
    engine = kind(EngineModel([SQUEEZED, CALL, DONE], odd=True))
    async with serving(engine):
        outcome = await roll(client, engine, tokenizer="t")
    assert warned(outcome) == ["token_drift", "token_drift"]
    told = samples(outcome)
    assert [sample.kind for sample in told] == ["main", "drift", "drift"]
    for sample, turn in zip(told, engine.model.seen, strict=True):
        check_whole(sample, [turn])
    assert "retokenised" in outcome.warnings[0].message
    assert "expected '" in outcome.warnings[0].message


@both
async def test_drift_fails_a_rollout_that_wants_none(client: AsyncClient, kind: Kind) -> None:
    engine = kind(EngineModel([SQUEEZED, DONE], odd=True))
    async with serving(engine):
        outcome = await roll(client, engine, on_drift="fail")
    assert outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_TOKEN_DRIFT
    for sample, turn in zip(samples(outcome), engine.model.seen, strict=True):
        check_whole(sample, [turn])


@both
async def test_a_cut_answer_is_kept_as_it_is(client: AsyncClient, kind: Kind) -> None:
    engine = kind(EngineModel(["A long answer that goes on and on", DONE]))
    async with serving(engine):
        outcome = await roll(client, engine, sampling={"max_tokens": 3}, tokenizer="t")
    assert outcome.stop.truncated
    check_whole(only(outcome), engine.model.seen[:1])


async def test_an_engine_that_lists_ids_with_its_logprobs_only(client: AsyncClient) -> None:
    engine = SglangEngine(EngineModel([CALL, DONE]))
    engine.young = False  # type: ignore[misc]
    async with serving(engine):
        outcome = await roll(client, engine)
    check_whole(only(outcome), engine.model.seen)
    (segment,) = outcome.segments
    written = {span.policy_version for span in segment.spans if span.author == token_pb2.AUTHOR_MODEL}
    assert written == {"step-7"}


@both
async def test_logprobs_that_nobody_wants_are_not_asked_for(client: AsyncClient, kind: Kind) -> None:
    engine = kind(EngineModel([CALL, DONE]))
    async with serving(engine):
        outcome = await roll(client, engine, sampling={"logprobs": False})
    assert warned(outcome) == []
    assert [body["logprobs"] for body in engine.bodies()] == [False, False]
    sample = only(outcome)
    assert sample.logprobs is None
    assert sample.prompt_ids + sample.response_ids == engine.model.seen[-1].prompt + engine.model.seen[-1].ids


async def test_template_switches_reach_the_engine(client: AsyncClient) -> None:
    engine = VllmEngine(EngineModel([DONE]))
    tokenizer = {"name": "t", "template_kwargs": {"enable_thinking": False}}
    async with serving(engine):
        outcome = await roll(
            client, engine, tokenizer=tokenizer, sampling={"extra": {"chat_template_kwargs": {"a": 1}}}
        )
    assert outcome.stop.reason == "stop"
    assert engine.bodies()[0]["chat_template_kwargs"] == {"enable_thinking": False}

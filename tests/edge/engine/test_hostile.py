"""Engines that fail, refuse or lie: the error says what was wrong and what to do, and the rollout keeps its results."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web
from osmosis.rollout.v1 import outcome_pb2
from rollout_client import AsyncClient, samples

from tests.edge.engine.rolling import CALL, DONE, check_whole, only, roll, target, warned
from tests.support.engine_model import EngineModel
from tests.support.engines import Engine, OpenaiEngine, SglangEngine, VllmEngine, serving

Kind = Callable[[EngineModel], Engine]
Answer = dict[str, Any]
pytestmark = pytest.mark.asyncio(loop_scope="module")
both = pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
every = pytest.mark.parametrize("kind", [VllmEngine, SglangEngine, OpenaiEngine])
Category = outcome_pb2.FailureCategory
VALIDATION = outcome_pb2.FAILURE_CATEGORY_VALIDATION


def choice(**fields: Any) -> Callable[[Answer], None]:
    def spoil(answer: Answer) -> None:
        answer["choices"][0].update(fields)

    return spoil


def whole(**fields: Any) -> Callable[[Answer], None]:
    return lambda answer: answer.update(fields)


MALFORMED: dict[str, tuple[Callable[[Answer], None], str]] = {
    "no_choices": (lambda answer: answer.pop("choices"), "choices"),
    "empty_choices": (whole(choices=[]), "`choices` is empty"),
    "choices_no_list": (whole(choices={}), "$.choices"),
    "no_message": (choice(message=None), "`choices[0].message` is missing"),
    "message_no_object": (choice(message=[1]), "`choices[0].message`"),
    "other_role": (choice(message={"role": "user", "content": "hush"}), "`choices[0].message`"),
    "content_no_text": (choice(message={"role": "assistant", "content": 7}), "`choices[0].message`"),
    "calls_no_list": (choice(message={"role": "assistant", "content": "", "tool_calls": 7}), "`choices[0].message`"),
    "finish_no_text": (choice(finish_reason=7), "finish_reason"),
    "ids_no_list": (choice(token_ids="abc"), "token_ids"),
    "ids_of_text": (choice(token_ids=["a"]), "token_ids"),
    "ids_negative": (choice(token_ids=[-1]), "token_ids"),
    "ids_out_of_range": (choice(token_ids=[2**31]), "token_ids"),
    "ids_not_whole": (choice(token_ids=[0.5]), "token_ids"),
    "prompt_no_list": (whole(prompt_token_ids=7), "prompt_token_ids"),
    "prompt_out_of_range": (whole(prompt_token_ids=[2**40]), "prompt_token_ids"),
    "meta_no_object": (choice(meta_info=7), "meta_info"),
    "listed_no_triples": (choice(meta_info={"output_token_logprobs": [[-1.0, 5]]}), "output_token_logprobs"),
}


@both
@pytest.mark.parametrize(("spoil", "named"), MALFORMED.values(), ids=MALFORMED)
async def test_malformed_answers_name_the_field(
    client: AsyncClient, kind: Kind, spoil: Callable[[Answer], None], named: str
) -> None:
    engine = kind(EngineModel([CALL, DONE]))
    engine.spoil = lambda answer: spoil(answer) if len(engine.model.seen) == 2 else None
    async with serving(engine):
        outcome = await roll(client, engine)
    assert outcome.failure.category == VALIDATION
    assert outcome.failure.message.startswith("turn 2: the engine's answer is malformed: ")
    assert named in outcome.failure.message
    assert "hush" not in outcome.failure.message
    check_whole(only(outcome), engine.model.seen[:1])


SHORT: dict[str, Callable[[Answer], None]] = {
    "none": choice(logprobs=None, meta_info=None),
    "one": choice(logprobs={"content": [{"token": "a", "logprob": -1.0}]}, meta_info=None),
    "no_object": choice(logprobs=[1, 2], meta_info=None),
    "of_text": choice(logprobs={"content": [{"logprob": "a"}]}, meta_info=None),
}


@both
@pytest.mark.parametrize("spoil", SHORT.values(), ids=SHORT)
async def test_logprobs_that_do_not_fit_are_left_out_with_a_warning(
    client: AsyncClient, kind: Kind, spoil: Callable[[Answer], None]
) -> None:
    engine = kind(EngineModel([DONE]))
    engine.spoil = spoil
    async with serving(engine):
        outcome = await roll(client, engine)
    assert (outcome.stop.reason, warned(outcome)) == ("stop", ["logprobs_missing"])
    sample = only(outcome)
    assert sample.logprobs is None
    assert sample.response_ids == engine.model.seen[0].ids


async def test_logprobs_of_other_ids_are_not_taken_for_those_of_the_answer(client: AsyncClient) -> None:
    engine = SglangEngine(EngineModel([DONE]))

    def spoil(answer: Answer) -> None:
        answer["choices"][0]["meta_info"]["output_token_logprobs"].reverse()

    engine.spoil = spoil
    async with serving(engine):
        outcome = await roll(client, engine)
    assert warned(outcome) == ["logprobs_missing"]


@both
async def test_an_engine_that_is_too_old_is_told_which_version_it_takes(client: AsyncClient, kind: Kind) -> None:
    engine = kind(EngineModel([CALL, DONE]))

    def spoil(answer: Answer) -> None:
        answer.pop("prompt_token_ids", None)
        for name in ("token_ids", "prompt_token_ids", "meta_info"):
            answer["choices"][0].pop(name, None)

    engine.spoil = spoil
    async with serving(engine):
        outcome = await roll(client, engine)
    assert (outcome.stop.reason, warned(outcome)) == ("stop", ["tokens_unknown"])
    assert "from version" in outcome.warnings[0].message
    assert samples(outcome) == []


@both
async def test_ids_that_no_tokenizer_has_break_nothing(client: AsyncClient, kind: Kind) -> None:
    engine = kind(EngineModel([CALL, DONE]))

    def spoil(answer: Answer) -> None:
        told = answer["choices"][0] if kind is SglangEngine else answer
        told["prompt_token_ids"] = [2**31 - 1, *told["prompt_token_ids"][1:]]

    engine.spoil = spoil
    async with serving(engine):
        outcome = await roll(client, engine, tokenizer="t")
    assert outcome.stop.reason == "stop"
    assert only(outcome).prompt_ids[0] == 2**31 - 1


async def test_a_huge_answer_is_given_up(client: AsyncClient) -> None:
    engine = VllmEngine(EngineModel([DONE]))
    engine.spoil = whole(more="x" * (65 * 2**20))
    async with serving(engine):
        outcome = await roll(client, engine)
    assert outcome.failure.category == VALIDATION
    assert "bytes" in outcome.failure.message


async def test_an_error_that_calls_itself_an_answer(client: AsyncClient) -> None:
    engine = OpenaiEngine(EngineModel([DONE]))
    engine.first = [web.json_response({"error": {"message": "Overloaded, says hush-hush"}})]
    async with serving(engine):
        outcome = await roll(client, engine, credentials={"completions_bearer": "hush-hush"})
    assert outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_ENGINE_SERVER
    assert outcome.failure.message.endswith("(with an error in place of choices): Overloaded, says [redacted]")


async def test_an_answer_that_is_no_json(client: AsyncClient) -> None:
    engine = VllmEngine(EngineModel([DONE]))
    engine.first = [web.Response(text="<html>")]
    async with serving(engine):
        outcome = await roll(client, engine)
    assert outcome.failure.category == VALIDATION
    assert "not JSON" in outcome.failure.message


@every
async def test_a_conversation_that_does_not_fit_ends_with_the_engines_words(client: AsyncClient, kind: Kind) -> None:
    engine = kind(EngineModel([CALL, DONE]))
    async with serving(engine):
        whole_turn = await roll(client, engine)
        assert whole_turn.stop.reason == "stop"
        engine.model.context = len(engine.model.seen[0].prompt) + len(engine.model.seen[0].ids)
        engine.model.seen.clear()
        outcome = await roll(client, engine)
    assert (outcome.failure.category, outcome.failure.turn, outcome.failure.http_status) == (VALIDATION, 2, 400)
    assert "does not fit into the model's context" in outcome.failure.message
    assert outcome.failure.message.endswith(("tokens).", "messages.", "limit."))
    if kind is not OpenaiEngine:
        check_whole(only(outcome), engine.model.seen)


async def test_an_unknown_model_names_where_its_name_stands(client: AsyncClient) -> None:
    engine = VllmEngine(EngineModel([DONE]))
    async with serving(engine):
        outcome = await roll(client, engine, completions=target(engine, model="other"))
    assert outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_ENGINE_CLIENT
    assert "completions.model" in outcome.failure.message
    assert outcome.failure.message.endswith("The model `other` does not exist.")


async def test_a_refused_key_is_not_repeated(client: AsyncClient) -> None:
    engine = OpenaiEngine(EngineModel([DONE]))
    said = {"error": {"message": "Incorrect API key provided: hush-hush", "code": "invalid_api_key"}}
    engine.first = [web.json_response(said, status=401)]
    async with serving(engine):
        outcome = await roll(client, engine, credentials={"completions_bearer": "hush-hush"})
    assert "credentials.completions_bearer" in outcome.failure.message
    assert "hush" not in outcome.failure.message
    assert len(engine.requests) == 1


PASSING: dict[str, Callable[[], web.Response]] = {
    "busy": lambda: web.Response(status=429, headers={"Retry-After": "0"}),
    "busy_without_word": lambda: web.Response(status=429),
    "away": lambda: web.Response(status=503, headers={"Retry-After": "0"}),
    "broken": lambda: web.Response(status=500),
}


@pytest.mark.parametrize("response", PASSING.values(), ids=PASSING)
async def test_what_passes_is_waited_for_without_a_warning(
    client: AsyncClient, response: Callable[[], web.Response]
) -> None:
    engine = SglangEngine(EngineModel([DONE]))
    engine.first = [response(), response()]
    async with serving(engine):
        outcome = await roll(client, engine)
    assert (outcome.stop.reason, warned(outcome), len(engine.requests)) == ("stop", [], 3)
    assert outcome.metrics.completion_attempts == 3


async def test_what_does_not_pass_fails_in_the_end(client: AsyncClient) -> None:
    engine = VllmEngine(EngineModel([DONE]))
    engine.first = [web.Response(status=429, text="slow down") for _ in range(9)]
    async with serving(engine):
        outcome = await roll(client, engine)
    assert outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_RATE_LIMITED
    assert len(engine.requests) == 3


@both
async def test_an_answer_that_was_broken_off_is_asked_for_again(client: AsyncClient, kind: Kind) -> None:
    engine = kind(EngineModel([CALL, DONE], aborts=2))
    async with serving(engine):
        outcome = await roll(client, engine)
    assert (outcome.stop.reason, warned(outcome)) == ("stop", [])
    check_whole(only(outcome), engine.model.seen)
    assert outcome.metrics.completion_attempts == 4


@both
async def test_an_engine_that_breaks_off_for_ever_fails_the_rollout(client: AsyncClient, kind: Kind) -> None:
    engine = kind(EngineModel([DONE], aborts=99))
    async with serving(engine):
        outcome = await roll(client, engine)
    assert outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_ENGINE_SERVER
    assert "(finish_reason 'abort') in 3 attempts" in outcome.failure.message


async def test_an_engine_that_is_not_there(client: AsyncClient) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        engine = VllmEngine(EngineModel([DONE]), url=f"http://127.0.0.1:{held.getsockname()[1]}")
        outcome = await roll(client, engine)
    assert outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_NETWORK
    assert "completions.url" in outcome.failure.message


async def test_a_parameter_that_no_engine_could_read_is_not_sent(client: AsyncClient) -> None:
    engine = VllmEngine(EngineModel([DONE]))
    async with serving(engine):
        outcome = await roll(client, engine, sampling={"extra": {"max_tokens": "many"}})
    assert outcome.failure.category == VALIDATION
    assert "`max_tokens`" in outcome.failure.message
    assert engine.requests == []


async def test_what_cannot_be_rendered_here_names_the_way_out(client: AsyncClient) -> None:
    engine = VllmEngine(EngineModel([DONE]))
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    async with serving(engine):
        outcome = await roll(client, engine, tokenizer="t", messages=[{"role": "user", "content": [image]}])
    assert outcome.WhichOneof("end") == "failure"
    assert "without `tokenizer` the engine's own rendering is taken as it is" in outcome.failure.message
    assert engine.requests == []


async def test_rollouts_beside_each_other_do_not_mix(client: AsyncClient) -> None:
    engines = [VllmEngine(EngineModel([CALL] * number + [DONE])) for number in range(1, 5)]
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(serving(engine))
        outcomes = await asyncio.gather(*(roll(client, engine) for engine in engines))
    for outcome, engine in zip(outcomes, engines, strict=True):
        check_whole(only(outcome), engine.model.seen)

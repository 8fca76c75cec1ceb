"""A `max_tokens` that the engine's context cannot hold, asked for by an agent that owns its loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from aiohttp import web
from rollout_client import AsyncClient, samples

from tests.edge.engine.rolling import check_once, roll, target
from tests.support.engine_model import EngineModel
from tests.support.engines import Engine, OpenaiEngine, SglangEngine, VllmEngine, serving

MODES: dict[str, dict[str, Any]] = {
    "messages": {},
    "predicted": {"tokenizer": "t"},
    "tokens": {"token_mode": "tokens", "tokenizer": "t"},
}
WITHOUT_NUMBERS = (
    "This model's maximum context length is 120 tokens. However, you requested 32000 output tokens and your prompt contains at "
    "least 1 input tokens, for a total of at least 32001 tokens.",
    "max_completion_tokens=32000 cannot be greater than max_model_len=max_total_tokens=120.",
    "max_tokens is too large: 32000. This model supports at most 110 completion tokens, whereas you provided 32000.",
    "The context length is exceeded.",
)
pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = "one two three four five six seven eight nine ten " * 10


@pytest.mark.parametrize(("kind", "mode"), [*product((VllmEngine, SglangEngine), MODES), (OpenaiEngine, "messages")])
async def test_it_is_lowered_to_what_the_prompt_leaves(
    client: AsyncClient, kind: Callable[[EngineModel], Engine], mode: str
) -> None:
    """The last answer is cut. A prompt that is too long itself is told to the agent, which then shortens it."""
    engine = kind(EngineModel(["Well.", LONG], context=120))
    async with serving(engine):
        outcome = await roll(client, engine, agent="shortening", sampling={"max_tokens": 32_000}, **MODES[mode])
    assert (outcome.failure.message, outcome.stop.reason) == ("", "stop")
    seen = engine.model.seen
    assert [generated.finish for generated in seen] == ["stop", "length"]
    assert len(seen[1].prompt) + len(seen[1].ids) == 120
    tokens, maximum = json.loads(outcome.extra_json)["said"]
    assert (tokens or 121) > (maximum or 120) == 120
    if kind is not OpenaiEngine:
        limits = [body.get("sampling_params", body).get("max_tokens") for _, body in engine.requests]
        assert {120 - len(generated.prompt) for generated in seen} <= set(limits)
        check_once(samples(outcome), seen)


@pytest.mark.parametrize("text", WITHOUT_NUMBERS)
async def test_it_is_left_out_where_the_engine_does_not_say_how_much_is_left(client: AsyncClient, text: str) -> None:
    engine = VllmEngine(EngineModel([LONG, LONG], context=120))
    error = {"error": {"message": text, "type": "BadRequestError", "param": None, "code": 400}}
    engine.first = [web.json_response(error, status=400)]
    async with serving(engine):
        await roll(client, engine, agent="shortening", sampling={"max_tokens": 32_000})
    first, second = engine.bodies()[:2]
    assert (first["max_tokens"], second.get("max_tokens")) == (32_000, None)
    assert {**second, "max_tokens": 32_000} == first
    assert len(engine.model.seen[0].prompt) + len(engine.model.seen[0].ids) == 120


async def test_an_engine_that_keeps_a_token_to_itself_is_asked_a_third_time(client: AsyncClient) -> None:
    """SGLang's earlier versions refuse a completion that would fill the context."""

    class Older(EngineModel):
        def generate(self, prompt: Any, most: int | None = None) -> Any:
            return super().generate(prompt, None if most is None else most + 1)

    engine = SglangEngine(Older(["Well."], context=120))
    async with serving(engine):
        outcome = await roll(client, engine, agent="shortening", sampling={"max_tokens": 32_000})
    assert outcome.stop.reason == "stop"
    limits = [body.get("max_tokens") for body in engine.bodies()]
    assert limits[:3] == [32_000, 120 - len(engine.model.seen[0].prompt), None]


async def test_the_log_says_it(client: AsyncClient) -> None:
    engine = VllmEngine(EngineModel(["Well."], context=120))
    notes = []
    async with serving(engine):
        run = client.run(
            agent="shortening",
            messages=[{"role": "user", "content": "5 plus 3?"}],
            completions=target(engine),
            sampling={"max_tokens": 32_000},
        )
        async for event in run:
            notes += [event.note] if event.note.code == "max_tokens_lowered" else []

    left = 120 - len(engine.model.seen[0].prompt)
    assert notes[0].text.endswith(f"refused max_tokens 32,000 as too large and was asked again with max_tokens {left}")


async def test_a_rollout_that_the_server_plays_fails(client: AsyncClient) -> None:
    """There the request says what `max_tokens` is, and whoever sends it can lower it."""
    engine = VllmEngine(EngineModel(["Well."], context=120))
    async with serving(engine):
        outcome = await roll(client, engine, agent="sums", sampling={"max_tokens": 32_000})
    assert "does not fit into the model's context" in outcome.failure.message
    assert len(engine.requests) == 1

"""Sampling parameters for one turn: the engine receives them for that turn only, in either mode."""

from __future__ import annotations

from typing import Any

import pytest
from rollout_client import AsyncClient

from tests.edge.engine.rolling import only, roll, target, warned
from tests.support.engine_model import EngineModel
from tests.support.engines import Engine, OpenaiEngine, SglangEngine, VllmEngine, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAMPLING: dict[str, Any] = {"temperature": 0.75, "max_tokens": 512, "extra": {"seed": 1}}
KEPT, OWN = (0.75, 512, 1), (0.25, 64, 2)


def sampled(parameters: dict[str, Any]) -> tuple[Any, ...]:
    limit = parameters.get("max_completion_tokens", parameters.get("max_tokens"))
    return parameters["temperature"], limit, parameters["seed"]


@pytest.mark.parametrize(
    ("kind", "reports"),
    [(VllmEngine, [True, False, True]), (SglangEngine, [True, False, True]), (OpenaiEngine, [False] * 3)],
)
async def test_in_message_mode(client: AsyncClient, kind: type[Engine], reports: list[bool]) -> None:
    engine = kind(EngineModel(["One.", "Two.", "Three."]))
    async with serving(engine):
        outcome = await roll(client, engine, agent="cooling", sampling=SAMPLING)
    assert outcome.stop.reason == "stop", outcome
    assert [sampled(body) for body in engine.bodies()] == [KEPT, OWN, KEPT]
    assert [body.get("logprobs", False) for body in engine.bodies()] == reports
    assert "logprobs_missing" not in warned(outcome)


async def test_by_the_other_name_of_the_limit(client: AsyncClient) -> None:
    engine = OpenaiEngine(EngineModel(["One.", "Two.", "Three."]))
    engine.reasons = True
    async with serving(engine):
        outcome = await roll(client, engine, agent="cooling", sampling=SAMPLING)
    assert outcome.stop.reason == "stop", outcome
    assert [sampled(body) for body in engine.bodies()] == [KEPT, KEPT, OWN, KEPT]
    assert [message["role"] for message in engine.bodies()[-1]["messages"]] == ["user", "assistant"] * 2 + ["user"]


@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
async def test_in_token_mode(client: AsyncClient, kind: type[Engine]) -> None:
    engine = kind(EngineModel(["One.", "Two.", "Three."]))
    async with serving(engine):
        mode: Any = {"tokenizer": "t", "token_mode": "tokens"}
        outcome = await roll(client, engine, agent="cooling", sampling=SAMPLING, completions=target(engine), **mode)
    assert outcome.stop.reason == "stop", outcome
    bodies = engine.bodies("/inference/v1/generate" if kind is VllmEngine else "/v1/chat/completions")
    asked = [body.get("sampling_params", body) for body in bodies]
    assert [sampled(parameters) for parameters in asked] == [KEPT, OWN, KEPT]
    assert [parameters.get("logprobs", False) is not False for parameters in asked] == [True, False, True]
    assert "logprobs_missing" not in warned(outcome)
    sample = only(outcome)
    assert sample.prompt_ids + sample.response_ids == engine.model.seen[-1].prompt + engine.model.seen[-1].ids

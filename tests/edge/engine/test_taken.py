"""Engines in requests: which are accepted, their URLs, and their part in the fingerprint."""

from __future__ import annotations

from typing import Any

import pytest
from rollout_client import AsyncClient, Conflict, InvalidRequest, Target
from rollout_server.edge.engine.completion_client import Routes

from tests.edge.engine.rolling import DONE, roll, target
from tests.support.engine_model import EngineModel
from tests.support.engines import OpenaiEngine, VllmEngine, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
URL = "http://127.0.0.1:9"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no_model": ({"completions": Target(URL, "vllm")}, "spec.completions.model"),
    "blank_model": ({"completions": Target(URL, "openai", model=" ")}, "spec.completions.model"),
    "long_model": ({"completions": Target(URL, "sglang", model="m" * 257)}, "spec.completions.model"),
    "model_of_a_trainer": ({"completions": Target(URL, "http_plain", model="m")}, "spec.completions.model"),
    "model_of_a_receiver": ({"outcome": Target(URL, model="m")}, "spec.outcome.model"),
    "engine_as_receiver": ({"outcome": Target(URL, "vllm", model="m")}, "spec.outcome.dialect"),
    "engine_over_grpc": ({"completions": Target("grpc://127.0.0.1:9", "vllm", model="m")}, "spec.completions.url"),
    "ids_without_tokenizer": (
        {"completions": Target(URL, "vllm", model="m"), "token_mode": "tokens"},
        "spec.tokenizer",
    ),
}


@pytest.mark.parametrize(("spec", "field"), REFUSED.values(), ids=REFUSED)
async def test_what_no_engine_could_be_is_refused(client: AsyncClient, spec: dict[str, Any], field: str) -> None:
    engine = OpenaiEngine(EngineModel([DONE]), url=URL)
    with pytest.raises(InvalidRequest) as refused:
        await roll(client, engine, **spec)
    assert field in str(refused.value)


@pytest.mark.parametrize(
    ("url", "chat", "generate"),
    [
        ("http://h:1", "http://h:1/v1/chat/completions", "http://h:1/inference/v1/generate"),
        ("http://h:1/v1", "http://h:1/v1/chat/completions", "http://h:1/inference/v1/generate"),
        ("http://h/a/v1", "http://h/a/v1/chat/completions", "http://h/a/inference/v1/generate"),
        (
            "https://h/v1beta/openai",
            "https://h/v1beta/openai/chat/completions",
            "https://h/v1beta/openai/inference/v1/generate",
        ),
    ],
)
async def test_where_engines_answer(url: str, chat: str, generate: str) -> None:
    routes = Routes.of(url)
    assert (routes.chat, routes.generate) == (chat, generate)


async def test_a_base_url_with_its_path_is_taken(client: AsyncClient) -> None:
    engine = VllmEngine(EngineModel([DONE]))
    async with serving(engine):
        at = Target(f"{engine.url}/v1/", "vllm", model="toy-model")
        outcome = await roll(client, engine, completions=at)
    assert outcome.stop.reason == "stop"


async def test_the_model_is_shown_and_part_of_what_a_request_is(client: AsyncClient) -> None:
    engine = VllmEngine(EngineModel([DONE]))
    async with serving(engine):
        run = client.run(messages=[{"role": "user", "content": "Go."}], completions=target(engine), request_id="q")
        async for _ in run:
            pass
        rollout = await client.get(run.uid)
        assert rollout.spec.completions.model == "toy-model"
        other = target(engine, model="other")
        with pytest.raises(Conflict):
            async for _ in client.run(messages=[{"role": "user", "content": "Go."}], completions=other, request_id="q"):
                pass

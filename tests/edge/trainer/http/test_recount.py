"""A trainer that renders or counts differently refuses the first mask once; from then on its way of counting is used."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from aiohttp import web
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.settings import Settings
from rollout_server.testing.trainer import StrictTrainer

from tests.support.tokenizers import REAL_TOKENIZERS, needs_real

QWEN = REAL_TOKENIZERS / "qwen2.5"
pytestmark = needs_real("qwen2.5")


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    ports: Any = {"host": "127.0.0.1", "http_port": 0, "grpc_port": 0}
    settings = Settings(_env_file=None, tokenizers={"qwen": QWEN}, tokenizers_offline=True, **ports)
    async with Server([Calculator()], settings) as server:
        yield server


async def roll(server: Server, trainer_url: str, rollout_id: str) -> dict[str, Any]:
    body = {
        "rollout_id": rollout_id,
        "server_url": trainer_url,
        "messages": [{"role": "user", "content": "Please calculate 5 plus 3, and then multiply the result by 2."}],
        "sampling_params": {"max_tokens": 512},
        "tokenizer_name": "qwen",
    }
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        answer = await client.post(f"http://127.0.0.1:{server.http_port}/rollout", json=body)
    result: dict[str, Any] = answer.json()
    return result


def requests(trainer: StrictTrainer, rollout_id: str) -> int:
    return sum(seen.body["rollout_id"] == rollout_id for seen in trainer.requests)


async def test_parsed_arguments_are_found_out_by_one_refusal_and_remembered(server: Server) -> None:
    url = f"http://127.0.0.1:{server.http_port}"
    async with StrictTrainer(QWEN, tools_from=url, parse_arguments=True) as trainer:
        first, second = await roll(server, trainer.url, "first"), await roll(server, trainer.url, "second")
        for answer in (first, second):
            assert (answer["status"], answer["error_message"]) == ("COMPLETED", None)
        turns = first["metrics"]["num_llm_calls"]
        assert turns == second["metrics"]["num_llm_calls"] > 1
        assert (requests(trainer, "first"), requests(trainer, "second")) == (turns + 1, turns)


async def test_a_way_of_counting_that_is_set_needs_no_refusal() -> None:
    ports: Any = {"host": "127.0.0.1", "http_port": 0, "grpc_port": 0, "count_arguments": "parsed"}
    settings = Settings(_env_file=None, tokenizers={"qwen": QWEN}, tokenizers_offline=True, **ports)
    async with Server([Calculator()], settings) as server:
        url = f"http://127.0.0.1:{server.http_port}"
        async with StrictTrainer(QWEN, tools_from=url, parse_arguments=True) as trainer:
            answer = await roll(server, trainer.url, "first")
            assert answer["status"] == "COMPLETED"
            assert requests(trainer, "first") == answer["metrics"]["num_llm_calls"]


async def test_one_that_refuses_every_mask_is_asked_twice_and_told_every_length(server: Server) -> None:
    masks: list[Any] = []

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        masks.append(body["response_mask"])
        if body["response_mask"] is not None:
            return web.json_response({"detail": "the response_mask is not mine"}, status=422)
        call = {"id": "a1", "type": "function", "function": {"name": "add", "arguments": '{"a": 5, "b": 3}'}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        return web.json_response({"choices": [choice], "token_ids": [1, 2], "logprobs": [-0.5, -0.5]})

    async with serving(complete) as url:
        ended = await roll(server, url, "refused")
    assert masks[0] is None
    lengths = [len(mask) for mask in masks[1:]]
    assert len(set(lengths)) == len(lengths) == 2
    assert ended["status"] == "ERROR"
    assert "the response_mask is not mine" in ended["error_message"]
    assert all(str(length) in ended["error_message"] for length in lengths)


async def test_another_422_is_not_a_question_of_counting(server: Server) -> None:
    bodies: list[Any] = []

    async def complete(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response({"detail": "messages are not append-only"}, status=422)

    async with serving(complete) as url:
        assert (await roll(server, url, "refused"))["status"] == "ERROR"
    assert len(bodies) == 1


@asynccontextmanager
async def serving(complete: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_where_the_tokens_part_is_told_with_both_texts(server: Server) -> None:
    """A trainer with other tools: its first prompt differs from the prediction, and the outcome quotes both texts."""
    other = {
        "type": "function",
        "function": {"name": "xylophone", "description": "y", "parameters": {"type": "object"}},
    }
    async with StrictTrainer(QWEN, tools=[other], parse_arguments=True) as trainer:
        ended = await roll(server, trainer.url, "first")
    assert ended["status"] == "COMPLETED"
    (drift,) = (warning for warning in ended["extra_fields"]["warnings"] if warning["code"] == "token_drift")
    assert "(prompt): expected " in drift["message"]
    ours, _, theirs = drift["message"].partition("reported")
    assert "xyl" in theirs
    assert "xyl" not in ours

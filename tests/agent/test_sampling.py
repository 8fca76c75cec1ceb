"""Sampling parameters for one turn: trainers of every protocol receive them for that turn only, and watchers see them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
import pytest_asyncio
from google.protobuf.json_format import MessageToDict
from rollout_client import AsyncClient
from rollout_server import Agent, Run
from rollout_server.app import Server
from rollout_server.settings import Settings
from rollout_server.testing import TrainerDialect
from rollout_server.testing.trainer import StrictTrainer

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES = [{"role": "user", "content": "Tell me a story."}]
OWN = {"temperature": 0.25, "max_tokens": 64, "stop": ["THE END"], "logprobs": False, "min_p": 0.1}


class Careful(Agent):
    """Change the sampling parameters in the second of three turns."""

    name = "careful"

    async def play(self, run: Run) -> None:
        await run.sample()
        await run.append({"role": "user", "content": "Shorter."})
        await run.sample(temperature=0.25, max_tokens=64, stop="THE END", logprobs=False, extra={"min_p": 0.1})
        await run.append({"role": "user", "content": "Longer."})
        await run.sample()


class SamplingServer:
    """A server, a trainer for all protocols, and clients of the server."""

    def __init__(self, trainer: StrictTrainer, http: httpx.AsyncClient, client: AsyncClient) -> None:
        self.trainer = trainer
        self.http = http
        self.client = client

    def bodies(self, rollout_id: str) -> list[dict[str, Any]]:
        """The HTTP requests to the trainer, without the conversation."""
        left_out = ("messages", "response_mask", "rollout_id", "model")
        bodies = [seen.body for seen in self.trainer.requests if seen.body["rollout_id"] == rollout_id]
        return [{k: v for k, v in body.items() if k not in left_out and v is not None} for body in bodies]

    def accepted(self, rollout_id: str) -> bool:
        verdict = self.trainer.verdict(rollout_id)
        return verdict is not None and not verdict.refusals


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place() -> AsyncIterator[SamplingServer]:
    ports: Any = {"host": "127.0.0.1", "http_port": 0, "grpc_port": 0}
    settings = Settings(_env_file=None, tokenizers={"toy": "toy"}, tokenizers_offline=True, drain_seconds=0, **ports)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(Server([Careful()], settings))
        url = f"http://127.0.0.1:{server.http_port}"
        trainer = await stack.enter_async_context(StrictTrainer(tools_from=url, dialect=TrainerDialect.EITHER))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60, trust_env=False))
        client = await stack.enter_async_context(AsyncClient(f"127.0.0.1:{server.grpc_port}"))
        yield SamplingServer(trainer, http, client)


async def test_in_the_synchronous_dialect(place: SamplingServer) -> None:
    body = {"rollout_id": "masked", "server_url": place.trainer.url, "messages": MESSAGES, "tokenizer_name": "toy"}
    sampled = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 512, "logprobs": True}
    answer = await place.http.post("/rollout", json={**body, "sampling_params": sampled})
    assert answer.json()["status"] == "COMPLETED", answer.text
    assert place.bodies("masked") == [sampled, {**sampled, **OWN}, sampled]
    assert place.accepted("masked")


async def test_in_the_asynchronous_dialect(place: SamplingServer) -> None:
    body = {"rollout_id": "plain", "server_url": place.trainer.url, "messages": MESSAGES}
    sampled = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 512, "logprobs": True, "min_p": 0.3, "seed": 2**64}
    answer = await place.http.post("/v1/rollout/init", json={**body, "completion_params": sampled})
    assert answer.status_code == 202, answer.text
    assert (await place.trainer.completed("plain"))["status"] == "COMPLETED"
    assert place.bodies("plain") == [sampled, {**sampled, **OWN}, sampled]
    assert place.accepted("plain")


@pytest.mark.parametrize("tokens", [False, True])
async def test_over_grpc_and_in_events(place: SamplingServer, tokens: bool) -> None:
    rollout_id = f"grpc-{tokens}"
    sampled: Any = {"temperature": 0.7, "max_tokens": 512, "extra": {"seed": 7}}
    named: Any = {"tokenizer": "toy"} if tokens else {}
    target = f"grpc://{place.trainer.grpc_target}"
    run = place.client.run(messages=MESSAGES, completions=target, rollout_id=rollout_id, sampling=sampled, **named)
    asked = [event.asked async for event in run if event.HasField("asked")]
    seen = [each.request for each in place.trainer.completions if each.request.rollout_id == rollout_id]
    kept = {"temperature": 0.7, "maxTokens": 512, "extraJson": seen[0].sampling.extra_json}
    own = {"temperature": 0.25, "maxTokens": 64, "stop": ["THE END"], "logprobs": False}
    told = [MessageToDict(request.sampling) for request in seen]
    assert json.loads(told[1].pop("extraJson")) == {"seed": 7, "min_p": 0.1}
    assert told == [kept, own, kept]
    assert [each.HasField("sampling") for each in asked] == [False, True, False]
    assert asked[1].sampling == seen[1].sampling
    outcome = (await place.client.get(run.uid, view="full")).outcome
    # The turn without logprobs causes no warning.
    assert [warning.code for warning in outcome.warnings] == []
    assert place.accepted(rollout_id)


async def test_events_over_http_say_it_too(place: SamplingServer) -> None:
    endpoint = {"url": f"grpc://{place.trainer.grpc_target}", "dialect": "grpc"}
    body = {"rollout_id": "page", "messages": MESSAGES, "completions": endpoint, "sampling": {"top_p": 0.5}}
    started = await place.http.post("/v1/rollouts", json=body)
    assert started.status_code == 201, started.text
    uid = started.json()["rollout"]["uid"]
    events = await place.http.get(f"/v1/rollouts/{uid}/events", headers={"accept": "text/event-stream"})
    lines = [line.removeprefix("data: ") for line in events.text.splitlines() if line.startswith("data: ")]
    asked = [each for each in map(json.loads, lines) if each.get("event") == "asked"]
    assert [each.get("sampling") for each in asked] == [
        None,
        {
            "temperature": 0.25,
            "top_p": 0.5,
            "max_tokens": 64,
            "stop": ["THE END"],
            "logprobs": False,
            "extra": {"min_p": 0.1},
        },
        None,
    ]

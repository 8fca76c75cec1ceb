"""A server for agent loops of the earlier SDK, and a strict trainer for all protocols."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import httpx
import pytest
import pytest_asyncio
from osmosis.rollout.v1.outcome_pb2 import Outcome
from rollout_client import AsyncClient
from rollout_server.app import Server
from rollout_server.sdk import (
    OpenAIFunctionToolSchema,
    RolloutAgentLoop,
    RolloutContext,
    RolloutRequest,
    RolloutResult,
    as_agent,
)
from rollout_server.sdk.testing import create_mock_trainer_app
from rollout_server.settings import Settings
from rollout_server.testing import TrainerDialect
from rollout_server.testing.http.app import SeenRequest
from rollout_server.testing.http.server import HttpServer
from rollout_server.testing.script import Script
from rollout_server.testing.trainer import StrictTrainer

from tests.sdk.calculator_agent import SCHEMAS

QUESTION = "Please calculate 5 plus 3, and then multiply the result by 2."


class Current(RolloutAgentLoop):
    """Delegate to a replaceable loop, so that many tests share a server."""

    name = "current"

    def __init__(self) -> None:
        self.loop: RolloutAgentLoop | None = None

    def get_tools(self, request: RolloutRequest) -> list[OpenAIFunctionToolSchema]:
        return SCHEMAS if self.loop is None else self.loop.get_tools(request)

    async def run(self, ctx: RolloutContext) -> RolloutResult:
        assert self.loop is not None
        return await self.loop.run(ctx)


@dataclass(frozen=True)
class SdkServer:
    """A running server, its trainer, and a client of the server. Each instance has its own rollout ids."""

    server: Server
    trainer: StrictTrainer
    http: httpx.AsyncClient
    current: Current = field(default_factory=Current)
    number: int = 0

    def id(self, rollout_id: str) -> str:
        """The id under which the trainer knows a rollout."""
        return f"{rollout_id}-{self.number}"

    async def masked(self, rollout_id: str, **changes: Any) -> dict[str, Any]:
        """Run one rollout through the synchronous HTTP API and return the response."""
        body = {
            "rollout_id": self.id(rollout_id),
            "server_url": self.trainer.url,
            "messages": [{"role": "user", "content": QUESTION}],
            "sampling_params": {"temperature": 0.7, "top_p": 0.9, "max_tokens": 512},
            "tokenizer_name": "toy",
        }
        answer = await self.http.post("/rollout", json=body | changes)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def start(self, rollout_id: str, **changes: Any) -> httpx.Response:
        """Start a rollout through the asynchronous HTTP API."""
        body = {
            "rollout_id": self.id(rollout_id),
            "server_url": self.trainer.url,
            "messages": [{"role": "user", "content": QUESTION}],
            "completion_params": {"temperature": 0.7, "top_p": 0.9, "max_tokens": 512},
        }
        return await self.http.post("/v1/rollout/init", json=body | changes)

    async def plain(self, rollout_id: str, **changes: Any) -> dict[str, Any]:
        """Run one rollout through the asynchronous HTTP API and return the outcome that the trainer received."""
        answer = await self.start(rollout_id, **changes)
        assert answer.status_code == 202, answer.text
        return dict(await self.trainer.completed(self.id(rollout_id)))

    async def of(self, dialect: str, rollout_id: str, **changes: Any) -> dict[str, Any]:
        """Run one rollout through either Osmosis HTTP API."""
        played = self.masked(rollout_id, **changes) if dialect == "masked" else self.plain(rollout_id, **changes)
        return await played

    async def mocked(self, rollout_id: str) -> dict[str, Any]:
        """Run one rollout through the asynchronous HTTP API with a mock trainer that accepts any list of messages."""
        listener = await HttpServer.open(create_mock_trainer_app(), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.port}"
        try:
            assert (await self.start(rollout_id, server_url=url)).status_code == 202
            async with httpx.AsyncClient(base_url=url, trust_env=False) as client, asyncio.timeout(60):
                while True:
                    told = (await client.get(f"/v1/rollout/completed/{self.id(rollout_id)}")).json()
                    if told:
                        return dict(told)
                    await asyncio.sleep(0.01)
        finally:
            await listener.close()

    async def over_grpc(self, rollout_id: str, **spec: Any) -> Outcome:
        """Run one rollout with a gRPC trainer and return the outcome with samples."""
        messages = [{"role": "user", "content": QUESTION}]
        async with AsyncClient(f"127.0.0.1:{self.server.grpc_port}") as client:
            url = f"grpc://{self.trainer.grpc_target}"
            run = client.run(messages=messages, completions=url, rollout_id=self.id(rollout_id), **spec)
            async for _ in run:
                pass
            return (await client.get(run.uid, view="full")).outcome

    def requests(self, rollout_id: str) -> Sequence[SeenRequest]:
        """The HTTP requests to the trainer for a rollout."""
        return [seen for seen in self.trainer.requests if seen.body["rollout_id"] == self.id(rollout_id)]

    def accepted(self, rollout_id: str) -> bool:
        """Whether the trainer accepted all requests of a rollout."""
        verdict = self.trainer.verdict(self.id(rollout_id))
        return verdict is not None and not verdict.refusals

    async def script(self, rollout_id: str, *lines: Any) -> None:
        """Set the trainer's script for a rollout."""
        await self.trainer.put_script(self.id(rollout_id), Script(lines))


OpenPlace = Callable[..., Awaitable[SdkServer]]


@asynccontextmanager
async def opened(loop: RolloutAgentLoop, debug_dir: str | None = None) -> AsyncIterator[SdkServer]:
    """A server for one loop."""
    settings = Settings(
        _env_file=None,
        host="127.0.0.1",
        http_port=0,
        grpc_port=0,
        tokenizers={"toy": "toy"},
        tokenizers_offline=True,
        retries=1,
        retry_base_seconds=0,
        drain_seconds=0,
    )
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(Server([as_agent(loop, debug_dir=debug_dir)], settings))
        url = f"http://127.0.0.1:{server.http_port}"
        trainer = await stack.enter_async_context(StrictTrainer(tools_from=url, dialect=TrainerDialect.EITHER))
        client = httpx.AsyncClient(base_url=url, timeout=60, trust_env=False)
        yield SdkServer(server, trainer, await stack.enter_async_context(client))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[tuple[SdkServer, Current]]:
    """A server shared by a module's tests, which replace its loop."""
    current = Current()
    async with opened(current) as place:
        yield place, current


@pytest.fixture(scope="module")
def numbers() -> count[int]:
    """Numbers for ids that are unique within the module."""
    return count(1)


@pytest.fixture
def open_place(shared: tuple[SdkServer, Current], numbers: count[int]) -> OpenPlace:
    """`await open_place(loop)`: the module's server, which runs this loop from now on."""
    place, current = shared

    async def chosen(loop: RolloutAgentLoop) -> SdkServer:
        current.loop = loop
        return replace(place, current=current, number=next(numbers))

    return chosen

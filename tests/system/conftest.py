"""The whole service with a strict trainer, in the test's own event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from rollout_server.agent import Agent
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.settings import Settings
from rollout_server.testing.model.calculator import CalculatorModel, Model
from rollout_server.testing.trainer import StrictTrainer

from tests.support.bodies import TOKENIZER


@dataclass(frozen=True)
class Service:
    """A server, its trainer, and an HTTP client for the server."""

    server: Server
    trainer: StrictTrainer
    http: httpx.AsyncClient


Open = Callable[..., Any]


async def open_world(
    stack: AsyncExitStack, *, agents: Sequence[Agent] = (), model: Model | None = None, **settings: Any
) -> Service:
    """Start a service that stops with the stack."""
    chosen = Settings(
        _env_file=None,
        host="127.0.0.1",
        http_port=0,
        grpc_port=0,
        **{"tokenizers": {TOKENIZER: "toy"}, "tokenizers_offline": True, "drain_seconds": 0, **settings},
    )
    server = await stack.enter_async_context(Server(agents or [Calculator()], chosen))
    url = f"http://127.0.0.1:{server.http_port}"
    trainer = await stack.enter_async_context(StrictTrainer(model=model or CalculatorModel(), tools_from=url))
    limits = httpx.Limits(max_connections=None)
    client = httpx.AsyncClient(base_url=url, timeout=60, limits=limits, trust_env=False)
    return Service(server, trainer, await stack.enter_async_context(client))


@pytest.fixture
async def open_here() -> AsyncIterator[Open]:
    """`await open_here(agents=..., model=..., **settings)`: a service that stops after the test."""
    async with AsyncExitStack() as stack:

        async def opened(**options: Any) -> Service:
            return await open_world(stack, **options)

        yield opened


@pytest.fixture
async def world(open_here: Open) -> Service:
    """A service with default settings."""
    opened: Service = await open_here()
    return opened

"""Servers with a channel to each, and a strict trainer with the calculator's tools."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

import pytest
from rollout_server.agent import Agent
from rollout_server.calculator import Calculator
from rollout_server.testing.trainer import StrictTrainer

from tests.support.agents import Gated, Idle, Measured
from tests.support.calculator_tools import calculator_tools
from tests.support.server_client import Caller, serving

OpenServer: TypeAlias = Callable[..., Awaitable[Caller]]


@pytest.fixture
async def open_server() -> AsyncIterator[OpenServer]:
    """Start servers from agents and settings."""
    async with AsyncExitStack() as stack:

        async def start(*agents: Agent, **changes: Any) -> Caller:
            return await stack.enter_async_context(serving(*agents, **changes))

        yield start


@pytest.fixture
def gated() -> Gated:
    return Gated()


@pytest.fixture
def measured() -> Measured:
    return Measured()


@pytest.fixture
async def caller(open_server: OpenServer, gated: Gated, measured: Measured) -> Caller:
    """A server of small agents; the default one ends at once."""
    return await open_server(Idle(), gated, measured, Calculator())


@pytest.fixture
async def trainer() -> AsyncIterator[StrictTrainer]:
    """A strict trainer with the calculator's tools."""
    async with StrictTrainer(tools=calculator_tools()) as strict:
        yield strict

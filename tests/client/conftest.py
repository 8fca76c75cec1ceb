"""A server with a strict trainer, a scripted server, and arguments for rollouts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from rollout_client import AsyncClient, Retry, StartFields
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.testing.trainer import StrictTrainer

from tests.client.scripted import Stage, scripted
from tests.support.agents import Gated, Measured
from tests.support.calculator_tools import calculator_tools
from tests.support.start_requests import settings
from tests.support.tcp_proxy import TcpProxy

QUICK = Retry(patience=20, first=0.01, longest=0.1)
IMPATIENT = Retry(patience=0.25, first=0.01, longest=0.1)
QUESTION = "Please calculate 5 plus 3, then multiply by 2."
CALCULATOR_EVENTS = 13


@dataclass(frozen=True)
class ServerAndTrainer:
    """A server of the calculator and two small agents, and its trainer."""

    server: Server
    trainer: StrictTrainer
    gated: Gated
    measured: Measured

    @property
    def port(self) -> int:
        """The server's gRPC port."""
        return self.server.grpc_port

    @property
    def address(self) -> str:
        """The server's address with host and port."""
        return f"127.0.0.1:{self.port}"

    def asked(self, **changes: Any) -> StartFields:
        """Keyword arguments for a calculation."""
        fields: dict[str, Any] = {
            "messages": [{"role": "user", "content": QUESTION}],
            "completions": self.trainer.url,
            "tokenizer": "toy",
            "sampling": {"temperature": 0.0},
        }
        return StartFields(**(fields | changes))  # type: ignore[typeddict-item]


@pytest.fixture
async def world() -> AsyncIterator[ServerAndTrainer]:
    """A real server and trainer, in this event loop."""
    gated, measured = Gated(), Measured()
    async with (
        Server([Calculator(), gated, measured], settings()) as server,
        StrictTrainer(tools=calculator_tools()) as trainer,
    ):
        yield ServerAndTrainer(server, trainer, gated, measured)


@pytest.fixture
async def line(world: ServerAndTrainer) -> AsyncIterator[TcpProxy]:
    """A proxy to the server that a test may break."""
    async with TcpProxy(world.port) as line:
        yield line


@pytest.fixture
async def far(line: TcpProxy) -> AsyncIterator[AsyncClient]:
    """A client that connects through the proxy."""
    async with AsyncClient(line.address, retry=QUICK) as client:
        yield client


@pytest.fixture
async def client(world: ServerAndTrainer) -> AsyncIterator[AsyncClient]:
    """A client that connects directly."""
    async with AsyncClient(world.address, retry=QUICK) as client:
        yield client


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    """A scripted server."""
    async with AsyncExitStack() as stack:
        yield await stack.enter_async_context(scripted())


@pytest.fixture
async def actor(stage: Stage) -> AsyncIterator[AsyncClient]:
    """A client of the scripted server."""
    async with AsyncClient(stage.address, retry=IMPATIENT) as client:
        yield client

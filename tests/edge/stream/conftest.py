"""A server with an agent, a channel to it, and trainers on streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import pytest
import pytest_asyncio
from osmosis.rollout.v1 import rollout_service_pb2 as rpb
from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub
from rollout_server import Agent, Run
from rollout_server.app import Server
from rollout_server.settings import Settings
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from transformers import AutoTokenizer

from tests.edge.stream.trainer import Trainer
from tests.support.talking_agent import Talk, noop

TURNS = 3
OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)


class Held(Agent):
    """Write `metadata.notes` notes, wait for the gate, then request one completion."""

    name = "held"
    replayable = True

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def play(self, run: Run) -> None:
        notes = run.metadata.get("notes", 0)
        assert isinstance(notes, int)
        for number in range(notes):
            run.note("note", str(number))
        await self.gate.wait()
        await run.sample()


@dataclass
class StreamServer:
    """A server, a channel to it, and its settings."""

    server: Server
    channel: grpc.aio.Channel
    held: Held
    answer: list[int]
    trainers: list[Trainer] = field(default_factory=list)

    @property
    def stub(self) -> Any:
        """A stub of RolloutService."""
        return RolloutServiceStub(self.channel)

    def trainer(self, **hello: Any) -> Trainer:
        """A trainer that is not connected yet."""
        self.trainers.append(Trainer(self.channel, self.answer, **hello))
        return self.trainers[-1]

    async def get(self, uid: str, view: Any = rpb.ROLLOUT_VIEW_SAMPLES) -> rpb.Rollout:
        """Read a rollout through RolloutService."""
        response: rpb.GetRolloutResponse = await self.stub.GetRollout(rpb.GetRolloutRequest(uid=uid, view=view))
        return response.rollout

    async def finished(self, uid: str) -> rpb.Rollout:
        """Wait until a rollout has finished, and read it."""
        await self.stub.WaitRollout(rpb.WaitRolloutRequest(uid=uid))
        return await self.get(uid)


OpenPlace = Callable[..., Awaitable[StreamServer]]


@pytest.fixture(scope="session")
def toy() -> Any:
    return AutoTokenizer.from_pretrained(TOY_TOKENIZER)


async def opened(stack: AsyncExitStack, toy: Any, **changes: Any) -> StreamServer:
    """Start a server with these settings."""
    ports: dict[str, Any] = {"host": "127.0.0.1", "http_port": 0, "grpc_port": 0, "http": False}
    tokens: dict[str, Any] = {"tokenizers": {"t": TOY_TOKENIZER}, "tokenizers_offline": True}
    held = Held()
    settings = Settings(_env_file=None, **(ports | tokens | changes))
    server = await stack.enter_async_context(Server([Talk(TURNS, noop), held], settings))
    address = f"127.0.0.1:{server.grpc_port}"
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=OPTIONS))
    answer = list(toy.encode("Yes.<|im_end|>", add_special_tokens=False))
    return StreamServer(server, channel, held, answer)


@pytest_asyncio.fixture(loop_scope="module")
async def open_place(toy: Any) -> AsyncIterator[OpenPlace]:
    """Start servers for a single test."""
    async with AsyncExitStack() as stack:
        yield partial(opened, stack, toy)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def common(toy: Any) -> AsyncIterator[StreamServer]:
    """A server with default settings."""
    async with AsyncExitStack() as stack:
        yield await opened(stack, toy, max_streams_of_caller=1000)


@pytest_asyncio.fixture(loop_scope="module")
async def place(common: StreamServer) -> AsyncIterator[StreamServer]:
    """The shared server, without streams and running rollouts."""
    common.held.gate = asyncio.Event()
    yield common
    while common.trainers:
        common.trainers.pop().cut()
    selection = rpb.Selection(all=True, states=[rpb.ROLLOUT_STATE_RUNNING, rpb.ROLLOUT_STATE_QUEUED])
    await common.stub.CancelRollouts(rpb.CancelRolloutsRequest(selection=selection))

"""One real server, or a gateway in front of two of them, with API keys for two callers and an admin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_client import AsyncClient, NotFound, Retry
from rollout_gateway.app import create_app
from rollout_gateway.channel import open_channel
from rollout_gateway.http.serve import HttpListener, Listening
from rollout_gateway.settings import GatewaySettings
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.edge.api_keys import entry_of, new_key
from rollout_server.settings import Settings
from rollout_server.testing import TrainerDialect
from rollout_server.testing.trainer import StrictTrainer

from tests.support.agents import Gated, Measured
from tests.support.bodies import TOKENIZER
from tests.support.calculator_tools import calculator_tools
from tests.support.gateways import http_client
from tests.support.rest_gateway import Sse

ADMIN = "root"
QUICK = Retry(patience=5, first=0.01, longest=0.1)


@dataclass(frozen=True)
class Person:
    """A caller with clients: over HTTP, and over gRPC to each of the servers."""

    name: str
    key: str
    http: httpx.AsyncClient
    grpc: Sequence[AsyncClient]


@dataclass(frozen=True)
class Deployment:
    """The HTTP port, the servers behind it, and the callers. `stranger` has no key, `forger` a wrong one."""

    port: int
    servers: Sequence[Server]
    agents: Sequence[tuple[Gated, Measured]]
    trainer: StrictTrainer
    alice: Person
    bob: Person
    root: Person
    stranger: Person
    forger: Person

    async def server_of(self, uid: str) -> int:
        """The index of the server that has a rollout."""
        for number, client in enumerate(self.root.grpc):
            try:
                await client.get(uid)
            except NotFound:
                continue
            return number
        raise AssertionError(f"no server has {uid}")

    async def over_grpc(self, person: Person, uid: str) -> AsyncClient:
        """The caller's client of the server that has a rollout."""
        return person.grpc[await self.server_of(uid)]

    async def state(self, uid: str) -> pb.Rollout:
        """Read a rollout as the admin."""
        return await (await self.over_grpc(self.root, uid)).get(uid)

    async def finished(self, uid: str) -> pb.Rollout:
        """Wait until a rollout has finished, and read it."""
        return await (await self.over_grpc(self.root, uid)).wait(uid, timeout=60)

    async def finished_unwatched(self, uid: str) -> pb.Rollout:
        """The same by polling, without attaching to the rollout."""

        async def over() -> pb.Rollout | None:
            rollout = await self.state(uid)
            return rollout if rollout.state == pb.ROLLOUT_STATE_FINISHED else None

        found: pb.Rollout = await until(over)
        return found

    async def sse(self, person: Person, uid: str, query: str = "", last: str | None = None) -> Sse:
        """Open a stream of events."""
        key = {"authorization": f"Bearer {person.key}"} if person.key else {}
        return await Sse.open("127.0.0.1", self.port, f"/v1/rollouts/{uid}/events{query}", last, key)


async def until(ask: Callable[[], Awaitable[Any]]) -> Any:
    """Poll until the result is true, and return it."""
    while not (answer := await ask()):  # noqa: ASYNC110  # the state is on the other side of a socket
        await asyncio.sleep(0.01)
    return answer


@asynccontextmanager
async def place(servers: int = 1, *, default_key: bool = False, **settings: Any) -> AsyncIterator[Deployment]:
    """Start a deployment. With more than one server there is a separate gateway in front of them.

    `default_key`: that gateway uses alice's key for requests of the synchronous HTTP API without a key.
    """
    async with AsyncExitStack() as stack:
        keys = {name: new_key() for name in ("alice", "bob", ADMIN)}
        entries = tuple(entry_of(name, key, admin=name == ADMIN) for name, key in keys.items())
        running, agents = [], []
        for _ in range(servers):
            agents.append((Gated(), Measured()))
            chosen = _settings(entries, http=servers == 1, **settings)
            running.append(await stack.enter_async_context(Server([Calculator(), *agents[-1]], chosen)))
        port = running[0].http_port
        if servers > 1:
            gateway = GatewaySettings(synchronous_key=keys["alice"] if default_key else "")
            port = await _gateway(stack, running, gateway)
        trainer = await stack.enter_async_context(
            StrictTrainer(dialect=TrainerDialect.EITHER, tools=calculator_tools())
        )
        named = {"alice": keys["alice"], "bob": keys["bob"], "root": keys[ADMIN], "stranger": "", "forger": new_key()}
        people = {name: await _person(stack, (name, key), port, running) for name, key in named.items()}
        yield Deployment(port, running, agents, trainer, **people)


def _settings(entries: tuple[str, ...], **changes: Any) -> Settings:
    return Settings(
        _env_file=None,
        **{
            "host": "127.0.0.1",
            "http_port": 0,
            "grpc_port": 0,
            "api_keys": entries,
            "tokenizers": {TOKENIZER: "toy"},
            "tokenizers_offline": True,
            "drain_seconds": 0,
            "retry_base_seconds": 0.05,
            **changes,
        },
    )


async def _gateway(stack: AsyncExitStack, servers: Sequence[Server], settings: GatewaySettings) -> int:
    channels = [open_channel(f"127.0.0.1:{server.grpc_port}") for server in servers]
    for channel in channels:
        stack.push_async_callback(channel.close)
    listener = HttpListener(create_app(channels, settings), Listening("127.0.0.1", 0, grace_seconds=0.2))
    port = await listener.start()
    stack.push_async_callback(listener.stop)
    return port


async def _person(stack: AsyncExitStack, named: tuple[str, str], port: int, servers: Sequence[Server]) -> Person:
    name, key = named
    headers = {"authorization": f"Bearer {key}"} if key else {}
    base = f"http://127.0.0.1:{port}"
    http = await stack.enter_async_context(http_client(base, headers=headers, timeout=60))
    clients = [
        await stack.enter_async_context(AsyncClient(f"127.0.0.1:{server.grpc_port}", api_key=key or None, retry=QUICK))
        for server in servers
    ]
    return Person(name, key, http, clients)

"""A gateway that listens on a real port."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import uvicorn
from rollout_gateway.app import create_app
from rollout_gateway.body import EXAMPLE
from rollout_gateway.init_body import INIT_EXAMPLE
from rollout_gateway.settings import GatewaySettings

from tests.gateway.scripted_server import ScriptedServer


class Uvicorn(uvicorn.Server):
    """Tells when it listens and leaves signals to pytest."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


@dataclass(frozen=True)
class Gateway:
    """A gateway on a real port, before a scripted server on a Unix socket."""

    server: ScriptedServer
    client: httpx.AsyncClient
    host: str
    port: int

    async def post(self, value: Any = EXAMPLE, **more: Any) -> httpx.Response:
        """Asks for a rollout."""
        return await self.client.post("/rollout", json=value, **more)

    async def init(self, value: Any = INIT_EXAMPLE, **more: Any) -> httpx.Response:
        """Asks for a rollout in the asynchronous dialect."""
        return await self.client.post("/v1/rollout/init", json=value, **more)


@contextlib.asynccontextmanager
async def serving(address: str, settings: GatewaySettings) -> AsyncIterator[tuple[str, int]]:
    """Runs a gateway for the server at an address; yields where it listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with grpc.aio.insecure_channel(address) as channel:
            config = uvicorn.Config(create_app(channel, settings), log_config=None, lifespan="off")
            http_server = Uvicorn(config)
            running = asyncio.create_task(http_server.serve(sockets=[listener]))
            await http_server.listening.wait()
            try:
                yield listener.getsockname()
            finally:
                http_server.should_exit = True
                await running

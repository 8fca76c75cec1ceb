"""A gateway that listens on a real port."""

import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
from rollout_gateway.app import create_app
from rollout_gateway.http.serve import HttpListener, Listening
from rollout_gateway.settings import GatewaySettings
from starlette.types import ASGIApp

from tests.support.example_bodies import EXAMPLE, INIT_EXAMPLE
from tests.support.scripted_server import ScriptedServer

# An empty context. By default every client loads the system's authorities, which takes longer than most tests.
_TRUSTS_NOBODY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def http_client(url: str, **options: Any) -> httpx.AsyncClient:
    """A client for an http: URL."""
    return httpx.AsyncClient(base_url=url, verify=_TRUSTS_NOBODY, trust_env=False, **options)


@dataclass(frozen=True)
class Gateway:
    """A gateway on a real port, in front of a scripted server on a Unix socket."""

    server: ScriptedServer
    client: httpx.AsyncClient
    host: str
    port: int

    async def post(self, value: Any = EXAMPLE, **more: Any) -> httpx.Response:
        """Send a request to `POST /rollout`."""
        return await self.client.post("/rollout", json=value, **more)

    async def init(self, value: Any = INIT_EXAMPLE, **more: Any) -> httpx.Response:
        """Send a request to the asynchronous HTTP API."""
        return await self.client.post("/v1/rollout/init", json=value, **more)


@contextlib.asynccontextmanager
async def listening(app: ASGIApp) -> AsyncIterator[tuple[str, int]]:
    """Serve an application on a free port and yield host and port."""
    listener = HttpListener(app, Listening("127.0.0.1", 0))
    try:
        yield "127.0.0.1", await listener.start()
    finally:
        listener.hurry()
        await listener.stop()


@contextlib.asynccontextmanager
async def serving(address: str, settings: GatewaySettings) -> AsyncIterator[tuple[str, int]]:
    """Run a gateway for the server at an address, and yield host and port of the gateway."""
    async with grpc.aio.insecure_channel(address) as channel, listening(create_app(channel, settings)) as where:
        yield where

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from osmosis.rollout.v1.rollout_service_pb2_grpc import add_RolloutServiceServicer_to_server
from rollout_gateway.settings import GatewaySettings

from tests.support.gateways import Gateway, http_client, serving
from tests.support.scripted_server import ScriptedServer


@pytest.fixture
def settings() -> GatewaySettings:
    return GatewaySettings(detach_grace_seconds=1.5, max_body_bytes=100_000, max_metadata_bytes=1_000)


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """The address of a Unix socket. Its path must be short, and pytest's own folders are not."""
    with tempfile.TemporaryDirectory(prefix="gw") as folder:
        yield f"unix:{Path(folder) / 's'}"


@pytest.fixture
async def server(address: str) -> AsyncIterator[ScriptedServer]:
    scripted = ScriptedServer()  # type: ignore[abstract]  # rpcs that the gateway does not call
    grpc_server = grpc.aio.server()
    add_RolloutServiceServicer_to_server(scripted, grpc_server)
    grpc_server.add_insecure_port(address)
    await grpc_server.start()
    yield scripted
    await grpc_server.stop(None)


@pytest.fixture
async def gateway(server: ScriptedServer, address: str, settings: GatewaySettings) -> AsyncIterator[Gateway]:
    async with (
        serving(address, settings) as (host, port),
        http_client(f"http://{host}:{port}") as client,
    ):
        yield Gateway(server, client, host, port)

"""Channels to servers: addresses, TLS, and client certificates that are replaced during calls."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub, add_RolloutServiceServicer_to_server
from rollout_gateway.certificate_files import KeyPair
from rollout_gateway.channel import open_channel

from tests.support.certificates import Authority, replace
from tests.support.scripted_server import ScriptedServer
from tests.support.server_client import refusal, until

Code = grpc.StatusCode
INFO = pb.GetServerInfoRequest()


class Porter(ScriptedServer):
    """Record the client certificate and the connection of each call."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.names: list[str] = []

    async def _enter(self, rpc: str, context: Any) -> None:
        self.names += [name.decode() for name in context.auth_context().get("x509_common_name", ())]
        await super()._enter(rpc, context)


@asynccontextmanager
async def secured(authority: Authority, clients: Authority | None = None) -> AsyncIterator[tuple[Porter, int]]:
    """A server with TLS and its address; with `clients` it requires client certificates of that authority."""
    issued = authority.ca.issue_cert("localhost")
    chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
    trusted = clients.ca.cert_pem.bytes() if clients is not None else None
    credentials = grpc.ssl_server_credentials(
        [(issued.private_key_pem.bytes(), chain)], trusted, require_client_auth=clients is not None
    )
    porter, server = Porter(), grpc.aio.server()  # type: ignore[abstract]  # rpcs that nobody calls
    add_RolloutServiceServicer_to_server(porter, server)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield porter, port
    finally:
        await server.stop(None)


@pytest.mark.parametrize(
    "address",
    [
        *("", "host", "host:", ":50051", "host:0", "host:65536", "host:x", "http://h:1", "https://h:1", "dns:///h:1"),
        *("h:1/path", "h:1?q", "h:1#f", "h :1", "h:1\n", "grpc://", "grpcs://h", "[::1", "::1:50051x"),
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="is not an address of a rollout server"):
        open_channel(address)


def test_an_address_with_a_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match="API keys come with the requests") as caught:
        open_channel("grpcs://user:secret-1@host:1")
    assert "secret-1" not in str(caught.value)


@pytest.mark.parametrize("address", ["{}", "grpc://{}", "grpc://{}/"])
async def test_addresses_without_tls(address: str) -> None:
    async with open_server() as (_, port), open_channel(address.format(f"localhost:{port}")) as channel:
        assert (await RolloutServiceStub(channel).GetServerInfo(INFO, timeout=10)).running == 3


@asynccontextmanager
async def open_server() -> AsyncIterator[tuple[ScriptedServer, int]]:
    """A server without TLS, and its port."""
    scripted, server = ScriptedServer(), grpc.aio.server()  # type: ignore[abstract]  # rpcs that nobody calls
    add_RolloutServiceServicer_to_server(scripted, server)
    port = server.add_insecure_port("localhost:0")
    await server.start()
    try:
        yield scripted, port
    finally:
        await server.stop(None)


async def test_a_socket_is_called_without_tls_whatever_was_said(
    server: ScriptedServer, address: str, tmp_path: Path
) -> None:
    async with open_channel(address, tmp_path / "ca") as channel:
        assert (await RolloutServiceStub(channel).GetServerInfo(INFO, timeout=10)).running == 3


@pytest.mark.parametrize("address", ["{}", "grpcs://{}"])
async def test_tls_is_spoken_with_servers_of_the_authority(address: str, tmp_path: Path) -> None:
    authority = Authority()
    async with secured(authority) as (_, port):
        place = address.format(f"localhost:{port}")
        async with open_channel(place, authority.put_ca(tmp_path)) as trusting:
            assert (await RolloutServiceStub(trusting).GetServerInfo(INFO, timeout=10)).running == 3
        for distrusted, ca in ((place, Authority().put_ca(tmp_path, "other")), (f"grpcs://localhost:{port}", None)):
            async with open_channel(distrusted, ca) as distrusting:
                assert (await refusal(RolloutServiceStub(distrusting).GetServerInfo(INFO))).code is Code.UNAVAILABLE


async def test_a_scheme_goes_before_the_certificates(tmp_path: Path) -> None:
    authority = Authority()
    async with secured(authority) as (_, port):
        async with open_channel(f"grpc://localhost:{port}", authority.put_ca(tmp_path)) as plain:
            assert (await refusal(RolloutServiceStub(plain).GetServerInfo(INFO))).code is Code.UNAVAILABLE
        async with open_channel(f"localhost:{port}") as plain:
            assert (await refusal(RolloutServiceStub(plain).GetServerInfo(INFO))).code is Code.UNAVAILABLE


async def test_the_systems_authorities_are_trusted(tmp_path: Path, system: Path) -> None:
    authority = Authority()
    replace(system, Authority().ca.cert_pem.bytes() + "# Ämter\n".encode() + authority.ca.cert_pem.bytes())
    async with secured(authority) as (_, port), open_channel(f"grpcs://localhost:{port}") as channel:
        assert (await RolloutServiceStub(channel).GetServerInfo(INFO, timeout=10)).running == 3


@pytest.fixture
def system(tmp_path: Path) -> Iterator[Path]:
    """The system's CA file, set as an administrator would set it."""
    path = tmp_path / "system.pem"
    before = os.environ.get("SSL_CERT_FILE")
    os.environ["SSL_CERT_FILE"] = str(path)
    yield path
    del os.environ["SSL_CERT_FILE"]
    if before is not None:
        os.environ["SSL_CERT_FILE"] = before


async def test_a_server_by_another_name_has_to_be_told(tmp_path: Path) -> None:
    authority = Authority()
    ca = authority.put_ca(tmp_path)
    async with secured(authority) as (_, port):
        async with open_channel(f"127.0.0.1:{port}", ca) as channel:
            assert (await refusal(RolloutServiceStub(channel).GetServerInfo(INFO))).code is Code.UNAVAILABLE
        async with open_channel(f"127.0.0.1:{port}", ca, server_name="localhost") as channel:
            assert (await RolloutServiceStub(channel).GetServerInfo(INFO, timeout=10)).running == 3


async def test_a_server_that_demands_a_certificate_is_shown_it(tmp_path: Path) -> None:
    authority, clients = Authority(), Authority()
    ca = authority.put_ca(tmp_path)
    async with secured(authority, clients) as (porter, port):
        for pair in (None, authority.put(tmp_path, "stranger")):
            async with open_channel(f"localhost:{port}", ca, pair) as channel:
                assert (await refusal(RolloutServiceStub(channel).GetServerInfo(INFO))).code is Code.UNAVAILABLE
        async with open_channel(f"localhost:{port}", ca, clients.put(tmp_path, "gateway")) as channel:
            await RolloutServiceStub(channel).GetServerInfo(INFO, timeout=10)
    assert porter.names == ["gateway"]


async def test_a_client_certificate_is_replaced_while_a_call_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    authority, clients = Authority(), Authority()
    pair = clients.put(tmp_path, "gateway", common_name="old")
    ca = authority.put_ca(tmp_path)
    async with secured(authority, clients) as (porter, port), open_channel(f"localhost:{port}", ca, pair) as channel:
        stub = RolloutServiceStub(channel)
        porter.go.clear()
        items = aiter(stub.RunRollout(pb.RunRolloutRequest()))
        await anext(items)
        (old,) = (each._channel for each in channel._called)
        key = pair.key.read_bytes()
        pair.key.write_bytes(b"broken")
        while "is kept" not in caplog.text:
            await stub.GetServerInfo(INFO, timeout=10)
        assert set(porter.names) == {"old"}
        assert str(pair.key) in caplog.text
        assert key.decode() not in caplog.text
        clients.put(tmp_path, "gateway", common_name="new")
        while porter.names[-1] != "new":
            await stub.GetServerInfo(INFO, timeout=10)
        porter.go.set()
        assert (len(channel._called), old.closed()) == (2, False)
        assert (await anext(items)).event.HasField("finished")

        async def old_one_is_closed() -> bool:
            return len(channel._called) == 1 and old.closed()

        await until(old_one_is_closed)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    authority = Authority()
    pair, nowhere = authority.put(tmp_path), tmp_path / "nowhere"
    for ca, shown in ((nowhere, None), (None, KeyPair(pair.cert, nowhere)), (pair.key, None)):
        with pytest.raises(ValueError, match=r"No such file|no certificate") as caught:
            open_channel("h:1", ca, shown)
        assert str(tmp_path) in str(caught.value)

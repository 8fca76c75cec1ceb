"""Addresses, security and metadata of a client's connection."""

from __future__ import annotations

import asyncio
import copy
import math
import multiprocessing
import pickle
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import trustme
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_client import AsyncClient, Client, Retry, Tls, Unavailable
from rollout_client.connection import Settings, target

from tests.client.conftest import IMPATIENT, ServerAndTrainer
from tests.client.scripted import Scripted, Stage, event, finished, scripted, watched

INFO = pb.GetServerInfoResponse(version="1.2")
KEY = "sk-12 34~!"


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("localhost:50051", ("localhost:50051", "")),
        ("10.0.0.1:1", ("10.0.0.1:1", "")),
        ("[::1]:50051", ("[::1]:50051", "")),
        ("grpc://trainer.example:50051", ("trainer.example:50051", "grpc")),
        ("GRPCS://trainer.example:8443/", ("trainer.example:8443", "grpcs")),
        ("grpcs://trainer.example", ("trainer.example:443", "grpcs")),
        ("grpcs://[::1]", ("[::1]:443", "grpcs")),
        ("unix:/run/rollout.sock", ("unix:/run/rollout.sock", "unix")),
        ("unix:///run/rollout.sock", ("unix:///run/rollout.sock", "unix")),
    ],
)
def test_addresses(address: str, expected: tuple[str, str]) -> None:
    assert target(address) == expected


@pytest.mark.parametrize(
    "address",
    [
        "",
        "localhost",
        "grpc://localhost",
        "grpc://",
        ":50051",
        "http://localhost:50051",
        "dns:///localhost:50051",
        "localhost:port",
        "localhost:99999",
        "::1:50051",
        "localhost:50051/path",
        "localhost:50051?x=1",
        "local host:50051",
        "localhost:50051\n",
        "unix:",
        "unix:///",
        "höst:1",
        "grpc://user:hush@localhost:50051",
        "hush@localhost:50051",
    ],
)
def test_what_is_no_address(address: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match="address") as caught:
            kind(address)
        assert "hush" not in str(caught.value)
        assert caught.value.__cause__ is None


@pytest.mark.parametrize("address", [50051, None, b"localhost:1", object()])
def test_what_is_neither_an_address_nor_a_channel(address: Any) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(TypeError, match="address must be a str or a grpc"):
            kind(address)


@pytest.mark.parametrize("key", ["", "clé-hush", "hush\n", "hu\r\nsh", " hush", "hush ", "hush\x00", "\ud83dhush"])
def test_keys_that_cannot_be_sent_are_refused_when_the_client_is_made(key: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match="api_key") as caught:
            kind("localhost:1", api_key=key)
        assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "error"),
    [
        ({"authorization": "Bearer hush\n"}, ValueError),
        ({"x y": "hush"}, ValueError),
        ({":path": "hush"}, ValueError),
        ({"grpc-timeout": "hush"}, ValueError),
        ({"x": "hüsh"}, ValueError),
        ({"x": " hush"}, ValueError),
        ({"x": b"hush"}, TypeError),
        ({"x-bin": "hush"}, TypeError),
        ({1: "hush"}, ValueError),
        ([("x", "hush")], TypeError),
    ],
)
def test_metadata_that_cannot_be_sent(metadata: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="call_metadata") as caught:
        Client("localhost:1", call_metadata=metadata)
    assert "hush" not in str(caught.value)
    with Client("localhost:1") as client, pytest.raises(error, match="call_metadata"):
        client.get("u", call_metadata=metadata)
    with Client("localhost:1") as client, pytest.raises(error, match="call_metadata"):
        client.watch("u", call_metadata=metadata)


def test_a_client_shows_where_it_connects_and_nothing_else() -> None:
    for kind in (Client, AsyncClient):
        client = kind("grpc://localhost:1", api_key="hush", call_metadata={"x-secret": "hush"})
        assert repr(client) == f"<{kind.__name__} grpc://localhost:1>"
        assert "hush" not in repr(vars(client))
    assert "hush" not in repr(Settings("localhost:1", api_key="hush", call_metadata={"x": "hush"}))
    assert "hush" not in repr(Tls(certificate=b"", key=b"hush"))


def test_a_client_stays_where_it_was_made() -> None:
    for client in (Client("localhost:1", api_key="hush"), AsyncClient("localhost:1", api_key="hush")):
        for leave in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="make one in each process"):
                leave(client)


@pytest.mark.parametrize("timeout", [-1, math.nan, "1", True])
def test_times_that_make_no_sense(timeout: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="timeout"):
        Client("localhost:1", timeout=timeout)


async def test_every_call_says_who_asks_and_carries_an_id(stage: Stage) -> None:
    stage.script.says("GetServerInfo", INFO)
    stage.script.says("WatchRollout", watched(event(1), finished(2)))
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "x-blob-bin": b"\xff\x00"}
    async with AsyncClient(stage.address, api_key=KEY, call_metadata={"x-team": "red"}) as client:
        await client.server_info()
        await client.server_info(call_metadata={**trace, "X-Request-Id": "mine", "authorization": "Bearer other"})
        assert len([each async for each in client.watch("u", call_metadata=trace)]) == 2

    def in_a_thread() -> None:
        with Client(stage.address, api_key=KEY, call_metadata={"x-team": "red"}) as client:
            client.server_info(call_metadata=trace)
            list(client.watch("u", call_metadata=trace))

    await asyncio.to_thread(in_a_thread)
    first, second, *others = (call.metadata for call in stage.script.seen)
    assert (first["authorization"], first["x-team"], "traceparent" in first) == (f"Bearer {KEY}", "red", False)
    assert (second["x-request-id"], second["authorization"]) == ("mine", "Bearer other")
    assert {each["traceparent"] for each in others} == {trace["traceparent"]}
    assert {each["x-blob-bin"] for each in others} == {b"\xff\x00"}
    assert {each["authorization"] for each in others} == {f"Bearer {KEY}"}
    assert len({each["x-request-id"] for each in (first, *others)}) == 4


async def test_answers_of_any_size(stage: Stage) -> None:
    large = pb.GetRolloutResponse(rollout=pb.Rollout(uid="x" * 20_000_000))
    stage.script.says("GetRollout", large)
    async with AsyncClient(stage.address) as client:
        assert await client.get("u") == large.rollout
    with Client(stage.address) as threads:
        assert await asyncio.to_thread(threads.get, "u") == large.rollout


async def test_a_unix_socket() -> None:
    script = Scripted()
    script.says("GetServerInfo", INFO)
    with tempfile.TemporaryDirectory(prefix="rc") as folder:
        server = grpc.aio.server(handlers=(script,))
        address = f"unix:{folder}/s"
        server.add_insecure_port(address)
        await server.start()
        async with AsyncClient(address, api_key=KEY) as client:
            assert await client.server_info() == INFO
        await server.stop(None)
    assert script.seen[0].metadata["authorization"] == f"Bearer {KEY}"


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


def server_credentials(authority: trustme.CA, name: str, *, asks: bool = False) -> grpc.ServerCredentials:
    cert = authority.issue_cert(name)
    pair = (cert.private_key_pem.bytes(), b"".join(blob.bytes() for blob in cert.cert_chain_pems))
    return grpc.ssl_server_credentials([pair], authority.cert_pem.bytes() if asks else None, asks)


async def test_tls_with_an_authority_of_ones_own(authority: trustme.CA, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(authority.cert_pem.bytes())
    async with scripted(server_credentials(authority, "127.0.0.1")) as stage:
        stage.script.says("GetServerInfo", INFO)
        for ca in (authority.cert_pem.bytes(), tmp_path / "ca.pem", str(tmp_path / "ca.pem")):
            for address in (stage.address, f"grpcs://{stage.address}"):
                async with AsyncClient(address, tls=Tls(ca=ca), api_key=KEY) as client:
                    assert await client.server_info() == INFO
        with Client(stage.address, tls=Tls(ca=authority.cert_pem.bytes())) as threads:
            assert await asyncio.to_thread(threads.server_info) == INFO
        stranger = Tls(ca=trustme.CA().cert_pem.bytes())
        for tls, address in ((stranger, stage.address), (None, f"grpcs://{stage.address}"), (None, stage.address)):
            async with AsyncClient(address, tls=tls, retry=IMPATIENT) as client:
                with pytest.raises(Unavailable):
                    await client.server_info()


async def test_the_name_in_a_certificate_may_be_given(authority: trustme.CA) -> None:
    async with scripted(server_credentials(authority, "rollouts.example")) as stage:
        stage.script.says("GetServerInfo", INFO)
        ca = authority.cert_pem.bytes()
        async with AsyncClient(stage.address, tls=Tls(ca=ca, server_name="rollouts.example")) as client:
            assert await client.server_info() == INFO
        async with AsyncClient(stage.address, tls=Tls(ca=ca), retry=IMPATIENT) as client:
            with pytest.raises(Unavailable):
                await client.server_info()


async def test_a_server_that_wants_to_see_a_certificate(authority: trustme.CA) -> None:
    cert = authority.issue_cert("client@example.org")
    chain, ca = b"".join(blob.bytes() for blob in cert.cert_chain_pems), authority.cert_pem.bytes()
    async with scripted(server_credentials(authority, "127.0.0.1", asks=True)) as stage:
        stage.script.says("GetServerInfo", INFO)
        tls = Tls(ca=ca, certificate=chain, key=cert.private_key_pem.bytes())
        async with AsyncClient(stage.address, tls=tls) as client:
            assert await client.server_info() == INFO
        async with AsyncClient(stage.address, tls=Tls(ca=ca), retry=IMPATIENT) as client:
            with pytest.raises(Unavailable):
                await client.server_info()


@pytest.mark.parametrize(
    ("tls", "error", "named"),
    [
        ({"ca": "/nowhere/ca.pem"}, OSError, "/nowhere/ca.pem"),
        ({"ca": b"nonsense"}, ValueError, "ca does not contain PEM"),
        ({"ca": "-----BEGIN CERTIFICATE-----hush"}, ValueError, "ca is PEM content in a str"),
        ({"certificate": b"-----BEGIN"}, ValueError, "certificate and key"),
        ({"key": b"-----BEGIN hush"}, ValueError, "certificate and key"),
    ],
)
def test_certificates_that_cannot_be_read(tls: dict[str, Any], error: type[Exception], named: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(error, match=named) as caught:
            kind("localhost:1", tls=Tls(**tls))
        assert "hush" not in str(caught.value)


def test_tls_on_an_address_that_has_none() -> None:
    with pytest.raises(ValueError, match="tls is given"):
        Client("grpc://localhost:1", tls=Tls())
    with grpc.insecure_channel("localhost:1") as channel, pytest.raises(ValueError, match="tls is given"):
        Client(channel, tls=Tls())


async def test_a_channel_of_ones_own_is_used_and_left_open(stage: Stage) -> None:
    stage.script.says("GetServerInfo", INFO)
    async with grpc.aio.insecure_channel(stage.address) as channel:
        async with AsyncClient(channel, api_key=KEY) as client:
            assert await client.server_info() == INFO
        async with AsyncClient(channel) as client:
            assert await client.server_info() == INFO
            assert repr(client) == "<AsyncClient on a supplied channel>"
    assert stage.script.seen[0].metadata["authorization"] == f"Bearer {KEY}"


@pytest.fixture
def nowhere() -> str:
    """An address where no server listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def test_an_event_loop_of_its_own(nowhere: str) -> None:
    """A client may be created before its loop runs. Use from another loop raises an error that says so."""
    client = AsyncClient(nowhere, retry=Retry(patience=0))
    with pytest.raises(Unavailable):
        asyncio.run(client.server_info(timeout=5))
    with pytest.raises(RuntimeError, match="make one in each loop"):
        asyncio.run(client.server_info(timeout=5))


FORKING = """
import os, sys
from rollout_client import Client
client = Client(sys.argv[1])
assert client.server_info().version
child = os.fork()
if child == 0:
    try:
        client.server_info()
    except RuntimeError as error:
        os._exit(7 if "fork" in str(error) else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert client.server_info().version
"""


async def test_a_forked_process_is_told_to_make_its_own(world: ServerAndTrainer) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FORKING, world.address, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()


def version_of(address: str) -> str:
    """The server's version, read by a worker process."""
    with Client(address) as client:
        return client.server_info().version


async def test_processes_that_were_not_forked_have_their_own(world: ServerAndTrainer) -> None:
    spawning = multiprocessing.get_context("spawn")
    with Client(world.address) as client:
        version = (await asyncio.to_thread(client.server_info)).version
        with spawning.Pool(1) as pool:
            told = await asyncio.to_thread(pool.apply, version_of, (world.address,))
    assert told == version

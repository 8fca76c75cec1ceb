"""HTTPS over real sockets: client certificates, and server certificates that are replaced while serving."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from rollout_gateway.app import create_app
from rollout_gateway.certificate_files import KeyPair
from rollout_gateway.channel import open_channel
from rollout_gateway.http.serve import HttpListener, Listening, server_context
from rollout_gateway.settings import GatewaySettings
from rollout_server.embedded_gateway import EmbeddedGateway

from tests.support.certificates import Authority, replace
from tests.support.scripted_server import ScriptedServer
from tests.support.server_client import until


@pytest.fixture
def authority() -> Authority:
    return Authority()


@asynccontextmanager
async def gateway(address: str, tls: KeyPair, client_ca: Path | None = None) -> AsyncIterator[int]:
    """Run a gateway with TLS in front of the server at an address; yield its port."""
    async with open_channel(address) as channel:
        listening = Listening("127.0.0.1", 0, tls, client_ca, grace_seconds=0.5)
        listener = HttpListener(create_app(channel, GatewaySettings()), listening)
        try:
            yield await listener.start()
        finally:
            await listener.stop()


def client(port: int, context: ssl.SSLContext, *, keep: bool = False) -> httpx.AsyncClient:
    limits = httpx.Limits(max_keepalive_connections=20 if keep else 0)
    return httpx.AsyncClient(base_url=f"https://localhost:{port}", verify=context, limits=limits, trust_env=False)


async def shown(port: int, context: ssl.SSLContext) -> str:
    """The common name in the certificate that a new connection receives."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
    found = writer.get_extra_info("peercert")
    writer.transport.abort()
    (name,) = [value for ((field, value),) in found["subject"] if field == "commonName"]
    return str(name)


async def test_requests_are_answered_over_tls_only(
    server: ScriptedServer, address: str, authority: Authority, tmp_path: Path
) -> None:
    async with gateway(address, authority.put(tmp_path)) as port:
        async with client(port, authority.client()) as trusting:
            assert (await trusting.get("/health")).status_code == 200
            assert (await trusting.post("/rollout", content=b"{}")).status_code == 422
        async with client(port, ssl.create_default_context()) as distrusting:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await distrusting.get("/health")
        async with httpx.AsyncClient(trust_env=False) as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get(f"http://127.0.0.1:{port}/health")
        async with client(port, authority.client()) as trusting:
            assert (await trusting.get("/health")).status_code == 200


async def test_the_server_in_the_same_process_speaks_tls_too(
    server: ScriptedServer, address: str, authority: Authority, tmp_path: Path
) -> None:
    listening = Listening("127.0.0.1", 0, authority.put(tmp_path))
    async with open_channel(address) as channel:
        http = EmbeddedGateway(channel, listening, GatewaySettings(), metrics=lambda: b"# of this process\n")
        port = await http.start()
        async with client(port, authority.client()) as trusting:
            assert (await trusting.get("/health")).status_code == 200
            assert "# of this process" in (await trusting.get("/metrics")).text
        await http.stop()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_client_without_a_certificate_that_is_demanded_is_not_served(
    server: ScriptedServer, address: str, authority: Authority, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    clients = Authority()
    tls = authority.put(tmp_path)
    async with gateway(address, tls, clients.put_ca(tmp_path)) as port:
        for certificate_of in (None, authority):
            context = authority.client(certificate_of)
            context.maximum_version = version
            async with client(port, context) as stranger:
                with pytest.raises(httpx.TransportError):
                    await stranger.get("/health")
        context = authority.client(clients)
        context.maximum_version = version
        async with client(port, context) as known:
            assert (await known.get("/health")).status_code == 200
    assert "GetServerInfo" in server.metadata


def test_old_versions_and_renegotiation_are_off(authority: Authority, tmp_path: Path) -> None:
    context = server_context(authority.put(tmp_path))
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.options & ssl.OP_NO_RENEGOTIATION


async def test_a_certificate_is_replaced_and_no_request_is_lost(
    server: ScriptedServer, address: str, authority: Authority, tmp_path: Path
) -> None:
    tls = authority.put(tmp_path, common_name="generation-0")
    context = authority.client()
    statuses: list[int] = []
    over = asyncio.Event()

    async def load(port: int, *, keep: bool) -> None:
        async with client(port, context, keep=keep) as asking:
            while not over.is_set():
                statuses.append((await asking.get("/health")).status_code)

    async with gateway(address, tls) as port:
        loads = [asyncio.create_task(load(port, keep=keep)) for keep in (True, True, False, False)]
        for generation in (1, 2, 3):
            authority.put(tmp_path, common_name=f"generation-{generation}")
            before, seen = len(statuses), set[str]()
            while f"generation-{generation}" not in seen or len(statuses) < before + 20:
                seen.add(await shown(port, context))
            assert seen <= {f"generation-{generation - 1}", f"generation-{generation}"}
        over.set()
        await asyncio.gather(*loads)
    assert set(statuses) == {200}


async def test_a_mounted_secret_is_replaced_by_its_link(
    server: ScriptedServer, address: str, authority: Authority, tmp_path: Path
) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        authority.put(tmp_path / name, common_name=name)
    link, mounted = tmp_path / "mounted", tmp_path / "mounted.next"
    link.symlink_to(tmp_path / "old")
    tls = KeyPair(link / "server.pem", link / "server.key")
    async with gateway(address, tls) as port:
        assert await shown(port, authority.client()) == "old"
        mounted.symlink_to(tmp_path / "new")
        mounted.replace(link)

        async def is_shown() -> bool:
            return await shown(port, authority.client()) == "new"

        await until(is_shown)


async def test_an_authority_that_is_replaced_no_longer_opens(
    server: ScriptedServer, address: str, authority: Authority, tmp_path: Path
) -> None:
    old, new = Authority(), Authority()
    tls = authority.put(tmp_path)
    async with gateway(address, tls, old.put_ca(tmp_path)) as port, client(port, authority.client(old)) as leaving:
        assert (await leaving.get("/health")).status_code == 200
        new.put_ca(tmp_path)
        async with client(port, authority.client(new)) as coming:
            while True:
                try:
                    assert (await coming.get("/health")).status_code == 200
                    break
                except httpx.TransportError:
                    await asyncio.sleep(0.02)
        with pytest.raises(httpx.TransportError):
            await leaving.get("/health")


async def logged(caplog: pytest.LogCaptureFixture, text: str, port: int, context: ssl.SSLContext) -> None:
    """Wait for a line of the log. Each handshake makes the gateway check the files."""

    async def is_there() -> bool:
        await shown(port, context)
        return text in caplog.text

    await until(is_there)


async def test_a_broken_pair_leaves_the_old_one_in_force_and_tells_the_file(
    server: ScriptedServer, address: str, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pair = authority.put(tmp_path, common_name="whole")
    key = pair.key.read_bytes()
    other_key = authority.put(tmp_path, "other").key.read_bytes()
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(gateway(address, pair))
        for content, complaint in (
            (other_key, "does not belong to"),
            (b"no key", "contains no key in PEM format"),
            (None, "cannot be read"),
        ):
            caplog.clear()
            if content is None:
                pair.key.unlink()
            else:
                replace(pair.key, content)
            await logged(caplog, complaint, port, authority.client())
            assert str(pair.key) in caplog.text
            assert "PRIVATE KEY" not in caplog.text
            assert await shown(port, authority.client()) == "whole"
        assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
        replace(pair.key, key)
        await logged(caplog, "was replaced", port, authority.client())
        assert await shown(port, authority.client()) == "whole"


def encrypted(key: Path) -> bytes:
    loaded = load_pem_private_key(key.read_bytes(), None)
    phrase = serialization.BestAvailableEncryption(b"phrase")
    return loaded.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, phrase)


def test_files_that_cannot_be_used_are_named(authority: Authority, tmp_path: Path) -> None:
    pair, other = authority.put(tmp_path), authority.put(tmp_path, "other")
    locked, nowhere, blank = tmp_path / "locked.key", tmp_path / "nowhere.pem", tmp_path / "blank.pem"
    locked.write_bytes(encrypted(pair.key))
    blank.write_bytes(b"\xff")
    for files, ca, path, complaint in (
        (KeyPair(nowhere, pair.key), None, nowhere, "No such file"),
        (KeyPair(pair.cert, nowhere), None, nowhere, "No such file"),
        (KeyPair(tmp_path, pair.key), None, tmp_path, "Is a directory"),
        (KeyPair(blank, pair.key), None, blank, "no certificate in PEM"),
        (KeyPair(pair.key, pair.key), None, pair.key, "no certificate in PEM"),
        (KeyPair(pair.cert, pair.cert), None, pair.cert, "no key in PEM"),
        (KeyPair(pair.cert, locked), None, locked, "without a passphrase"),
        (KeyPair(pair.cert, other.key), None, other.key, "does not belong to the certificate"),
        (pair, nowhere, nowhere, "No such file"),
        (pair, pair.key, pair.key, "no certificate in PEM"),
    ):
        with pytest.raises(ValueError, match=complaint) as caught:
            server_context(files, ca)
        assert str(path) in str(caught.value)
        assert "PRIVATE KEY" not in str(caught.value)

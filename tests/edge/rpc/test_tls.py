"""TLS and mTLS on real sockets: which clients are accepted, and certificates that are replaced while the server runs."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import grpc
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from rollout_server.edge.rpc.listener import RpcSettings
from rollout_server.edge.rpc.server import RpcServer
from rollout_server.edge.rpc.service import RolloutService, ServerFacts
from rollout_server.edge.rpc.tls import ClientTls, ServerTls, channel_credentials
from rollout_server.edge.tokens.cache import Tokenizers
from rollout_server.edge.tokens.loader import LoaderSettings
from rollout_server.runtime.groups.registry import GroupRegistry
from rollout_server.runtime.registry.registry import RolloutRegistry
from rollout_server.runtime.start_request import Caller

from tests.support.agents import Idle
from tests.support.server_client import CHANNEL_OPTIONS

SERVING = health_pb2.HealthCheckResponse.SERVING
SERVER_LOG = "rollout_server.edge.rpc.tls"


@dataclass(frozen=True)
class Files:
    """A directory with the files of a server."""

    directory: Path

    @property
    def tls(self) -> ServerTls:
        """TLS without client certificates."""
        return ServerTls(self.directory / "server.pem", self.directory / "server.key")

    @property
    def mutual(self) -> ServerTls:
        """TLS with client certificates (mTLS)."""
        return replace(self.tls, client_ca=self.directory / "clients.pem")

    def put(self, name: str, *parts: bytes) -> Path:
        """Replace a file atomically, by renaming."""
        path, fresh = self.directory / name, self.directory / f"{name}.new"
        fresh.write_bytes(b"".join(parts))
        return fresh.rename(path)

    def put_pair(self, certificate: trustme.LeafCert) -> None:
        """Replace certificate and key."""
        self.put("server.pem", *(pem.bytes() for pem in certificate.cert_chain_pems))
        self.put("server.key", certificate.private_key_pem.bytes())

    def client(self, ca: trustme.CA, certificate: trustme.LeafCert | None = None) -> ClientTls:
        """Files of a client that trusts `ca`."""
        trusted = self.put("ca.pem", ca.cert_pem.bytes())
        if certificate is None:
            return ClientTls(trusted)
        pem = self.put("client.pem", *(part.bytes() for part in certificate.cert_chain_pems))
        return ClientTls(trusted, pem, self.put("client.key", certificate.private_key_pem.bytes()))


@pytest.fixture
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def leaf(ca: trustme.CA) -> trustme.LeafCert:
    return ca.issue_cert("localhost", "127.0.0.1")


@pytest.fixture
def files(tmp_path: Path, ca: trustme.CA, leaf: trustme.LeafCert) -> Files:
    """Valid files: a pair, and the CA of the clients."""
    made = Files(tmp_path)
    made.put_pair(leaf)
    made.put("clients.pem", ca.cert_pem.bytes())
    return made


class Peers:
    """A server at `port` and at the Unix socket `socket`, and the channels to it."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.rpc: RpcServer
        self.port = 0
        self.socket = ""

    async def serve(self, tls: ServerTls | None, directory: Path) -> None:
        """Start the server."""
        roster = RolloutRegistry([Idle()], lambda *_: pytest.fail("nobody samples"), lambda: "u1")
        service = RolloutService(
            roster,
            GroupRegistry(roster),
            ServerFacts("1", (), 2**20, time.time(), lambda _: ()),
            Tokenizers(LoaderSettings()),
        )
        self.socket = f"unix:{directory / 's'}"
        self.rpc = RpcServer(service, RpcSettings(("127.0.0.1:0", self.socket), tls=tls), lambda _: Caller("me"))
        self.port, _ = await self.rpc.start()
        self._stack.push_async_callback(self.rpc.stop, 0)

    def channel(self, tls: ClientTls | None, host: str = "127.0.0.1") -> grpc.aio.Channel:
        """A channel that is closed at the end."""
        target = f"{host}:{self.port}"
        made = (
            grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
            if tls is None
            else grpc.aio.secure_channel(target, channel_credentials(tls), options=CHANNEL_OPTIONS)
        )
        self._stack.push_async_callback(made.close)
        return made

    async def certificate(self, client: ClientTls) -> bytes:
        """The certificate shown in a handshake, in DER."""
        context = ssl.create_default_context(cafile=client.ca)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        if client.certificate is not None:
            context.load_cert_chain(client.certificate, client.key)
        _, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=context)
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.transport.abort()
        assert isinstance(shown, bytes)
        return shown


Serve: TypeAlias = Callable[[ServerTls | None], Awaitable[Peers]]


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def start(tls: ServerTls | None) -> Peers:
            peers = Peers(stack)
            await peers.serve(tls, tmp_path)
            return peers

        yield start


async def answers(channel: grpc.aio.Channel) -> bool:
    """Whether a call succeeds. The only accepted failure is that there is no connection."""
    try:
        response = await HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return False
    return bool(response.status == SERVING)


def der(certificate: trustme.LeafCert) -> bytes:
    """The leaf certificate, in DER."""
    return ssl.PEM_cert_to_DER_cert(certificate.cert_chain_pems[0].bytes().decode())


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_a_client_that_trusts_the_ca_gets_in(serve: Serve, files: Files, ca: trustme.CA, host: str) -> None:
    peers = await serve(files.tls)
    assert await answers(peers.channel(files.client(ca), host))


async def test_a_port_with_tls_takes_no_plain_connection(serve: Serve, files: Files) -> None:
    peers = await serve(files.tls)
    assert not await answers(peers.channel(None))


async def test_unix_sockets_go_without(serve: Serve, files: Files) -> None:
    peers = await serve(files.mutual)
    async with grpc.aio.insecure_channel(peers.socket) as channel:
        assert await answers(channel)


async def test_a_client_with_another_ca_does_not_trust_the_server(serve: Serve, files: Files) -> None:
    peers = await serve(files.tls)
    assert not await answers(peers.channel(files.client(trustme.CA())))


async def test_a_client_wants_the_name_that_it_calls(serve: Serve, files: Files, ca: trustme.CA) -> None:
    files.put_pair(ca.issue_cert("elsewhere.example"))
    peers = await serve(files.tls)
    assert not await answers(peers.channel(files.client(ca)))


async def test_without_a_ca_of_its_own_a_client_trusts_the_system_only(serve: Serve, files: Files) -> None:
    peers = await serve(files.tls)
    assert not await answers(peers.channel(ClientTls()))


async def test_mtls_wants_a_certificate_of_its_own_cas(serve: Serve, files: Files, ca: trustme.CA) -> None:
    peers = await serve(files.mutual)
    assert await answers(peers.channel(files.client(ca, ca.issue_cert("client@trainer.internal"))))
    assert not await answers(peers.channel(files.client(ca)))
    assert not await answers(peers.channel(files.client(ca, trustme.CA().issue_cert("client@trainer.internal"))))
    assert not await answers(peers.channel(None))


async def test_new_handshakes_see_the_new_certificate_and_old_streams_live_on(
    serve: Serve, files: Files, ca: trustme.CA, leaf: trustme.LeafCert
) -> None:
    peers, client = await serve(files.tls), files.client(ca)
    old = peers.channel(client)
    watching = HealthStub(old).Watch(health_pb2.HealthCheckRequest())
    assert (await watching.read()).status == SERVING
    assert await peers.certificate(client) == der(leaf)
    other = trustme.CA()
    replaced = other.issue_cert("localhost", "127.0.0.1")
    files.put_pair(replaced)
    assert await peers.certificate(client) == der(replaced)
    assert await answers(peers.channel(files.client(other)))
    assert not await answers(peers.channel(files.client(ca)))
    assert await answers(old)
    await peers.rpc.say_not_serving()
    assert (await watching.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    watching.cancel()


async def test_the_cas_of_clients_are_replaced_too(serve: Serve, files: Files, ca: trustme.CA) -> None:
    peers = await serve(files.mutual)
    mine, theirs = ca.issue_cert("a@trainer.internal"), trustme.CA()
    assert await answers(peers.channel(files.client(ca, mine)))
    files.put("clients.pem", theirs.cert_pem.bytes())
    assert not await answers(peers.channel(files.client(ca, mine)))
    assert await answers(peers.channel(files.client(ca, theirs.issue_cert("b@trainer.internal"))))
    files.put("clients.pem", theirs.cert_pem.bytes(), ca.cert_pem.bytes())
    assert await answers(peers.channel(files.client(ca, mine)))


async def test_a_link_to_another_directory_is_followed(
    serve: Serve, tmp_path: Path, ca: trustme.CA, leaf: trustme.LeafCert
) -> None:
    """Kubernetes replaces secrets this way: all files at once, by one symbolic link."""
    replaced = ca.issue_cert("localhost", "127.0.0.1")
    for name, certificate in (("first", leaf), ("second", replaced)):
        (tmp_path / name).mkdir()
        Files(tmp_path / name).put_pair(certificate)
    link = tmp_path / "now"
    link.symlink_to("first")
    peers, client = await serve(Files(link).tls), Files(tmp_path).client(ca)
    assert await peers.certificate(client) == der(leaf)
    (tmp_path / "next").symlink_to("second")
    (tmp_path / "next").rename(link)
    assert await peers.certificate(client) == der(replaced)


async def test_handshakes_at_once_while_files_change(
    serve: Serve, files: Files, ca: trustme.CA, leaf: trustme.LeafCert
) -> None:
    peers, client = await serve(files.tls), files.client(ca)
    for _ in range(3):
        replaced = ca.issue_cert("localhost", "127.0.0.1")
        under_way = [asyncio.create_task(peers.certificate(client)) for _ in range(20)]
        files.put_pair(replaced)
        assert set(await asyncio.gather(*under_way)) <= {der(leaf), der(replaced)}
        assert await peers.certificate(client) == der(replaced)
        leaf = replaced


def break_key(files: Files) -> None:
    """Write the key of another certificate, as in the middle of a replacement."""
    files.put("server.key", trustme.CA().issue_cert("localhost").private_key_pem.bytes())


def break_key_text(files: Files) -> None:
    """Write half a key."""
    text = files.tls.key.read_bytes()
    files.put("server.key", text[: len(text) // 2])


def encrypt_key(files: Files) -> None:
    """Write a key with a password."""
    key = load_pem_private_key(files.tls.key.read_bytes(), None)
    files.put("server.key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"hunter2")))


def break_certificate(files: Files) -> None:
    """Write a file that is not a certificate."""
    files.put("server.pem", b"-----BEGIN CERTIFICATE-----\nhunter2\n-----END CERTIFICATE-----\n")


def empty_certificate(files: Files) -> None:
    """Write an empty file."""
    files.put("server.pem", b"")


def lose_key(files: Files) -> None:
    """Delete the key."""
    files.tls.key.unlink()


def lose_certificate(files: Files) -> None:
    """Delete the certificate."""
    files.tls.certificate.unlink()


BREAKAGES = [
    (break_key, "server.key does not belong to the certificate in .*server.pem"),
    (break_key_text, "server.key contains no TLS key in PEM without a password"),
    (encrypt_key, "server.key contains no TLS key in PEM without a password"),
    (break_certificate, "server.pem contains no TLS certificate in PEM"),
    (empty_certificate, "server.pem contains no TLS certificate in PEM"),
    (lose_key, "cannot read the TLS key in .*server.key: No such file"),
    (lose_certificate, "cannot read the TLS certificate in .*server.pem: No such file"),
]


@pytest.mark.parametrize(("breakage", "text"), BREAKAGES)
async def test_files_of_no_use_leave_the_old_ones_in_force(
    serve: Serve,
    files: Files,
    ca: trustme.CA,
    caplog: pytest.LogCaptureFixture,
    breakage: Callable[[Files], None],
    text: str,
) -> None:
    peers, client = await serve(files.tls), files.client(ca)
    before = await peers.certificate(client)
    with caplog.at_level(logging.INFO, SERVER_LOG):
        breakage(files)
        for _ in range(3):
            assert await peers.certificate(client) == before
        errors = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert len(errors) == 1
        assert re.search(f"the changed TLS files cannot be used.*{text}", errors[0].getMessage())
        replaced = ca.issue_cert("localhost", "127.0.0.1")
        files.put_pair(replaced)
        assert await peers.certificate(client) == der(replaced)
    assert "BEGIN" not in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize(("breakage", "text"), BREAKAGES)
async def test_a_server_does_not_start_without_its_files(
    serve: Serve, files: Files, breakage: Callable[[Files], None], text: str
) -> None:
    breakage(files)
    with pytest.raises((OSError, ValueError), match=text) as caught:
        await serve(files.tls)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"no PEM", None])
async def test_a_server_does_not_start_without_the_cas_of_its_clients(
    serve: Serve, files: Files, content: bytes | None
) -> None:
    """Otherwise it would accept no client, or every client."""
    files.put("clients.pem", content or b"")
    if content is None:
        (files.directory / "clients.pem").unlink()
    with pytest.raises((OSError, ValueError), match=r"clients\.pem"):
        await serve(files.mutual)


def test_a_client_needs_certificate_and_key(files: Files) -> None:
    for tls in (ClientTls(certificate=files.tls.certificate), ClientTls(key=files.tls.key)):
        with pytest.raises(ValueError, match="only one of TLS certificate and TLS key is set"):
            channel_credentials(tls)


@pytest.mark.parametrize(("breakage", "text"), BREAKAGES)
def test_a_clients_files_are_checked_too(files: Files, breakage: Callable[[Files], None], text: str) -> None:
    breakage(files)
    with pytest.raises((OSError, ValueError), match=text):
        channel_credentials(ClientTls(None, files.tls.certificate, files.tls.key))


def test_a_clients_ca_is_checked_too(files: Files) -> None:
    with pytest.raises(ValueError, match=r"empty\.pem contains no TLS certificate"):
        channel_credentials(ClientTls(files.put("empty.pem", b"")))
    with pytest.raises(FileNotFoundError, match=r"missing\.pem"):
        channel_credentials(ClientTls(files.directory / "missing.pem"))


async def test_without_tls_ports_are_plain(serve: Serve) -> None:
    peers = await serve(None)
    assert await answers(peers.channel(None))

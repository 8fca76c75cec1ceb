"""gRPC channels: connected to checked addresses, with the URL's host as the authority."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health_pb2_grpc import HealthStub, add_HealthServicer_to_server
from rollout_server.edge.targets.resolver import CheckedLookup
from rollout_server.edge.targets.rules import TargetRefused, TargetRules

from tests.support.resolver import Table

NO_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


@asynccontextmanager
async def health(certificate: trustme.LeafCert | None = None) -> AsyncIterator[int]:
    """A server of gRPC's health service on a free port."""
    server, servicer = grpc.aio.server(), HealthServicer()
    add_HealthServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    if certificate is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        chain = b"".join(pem.bytes() for pem in certificate.cert_chain_pems)
        credentials = grpc.ssl_server_credentials([(certificate.private_key_pem.bytes(), chain)])
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


def lookup(rules: str = "", **answers: str) -> CheckedLookup:
    """A lookup with scripted results. In names `_` stands for a dot; spaces separate addresses."""
    return CheckedLookup(
        TargetRules.parse(rules), Table({name.replace("_", "."): [text.split()] for name, text in answers.items()})
    )


async def serves(channel: grpc.aio.Channel) -> bool:
    """Whether a call succeeds."""
    async with channel:
        try:
            await HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=""), timeout=20)  # type: ignore[no-untyped-call]
        except grpc.aio.AioRpcError as error:
            return error.code() is not grpc.StatusCode.UNAVAILABLE
        return True


@pytest.mark.parametrize(
    ("url", "target", "authority", "secure"),
    [
        ("grpc://a.example:50051", "ipv4:10.0.0.1:50051,10.0.0.2:50051", "a.example:50051", False),
        ("grpcs://A.Example.:50051/", "ipv4:10.0.0.1:50051,10.0.0.2:50051", "a.example:50051", True),
        ("grpcs://b.example", "ipv6:[2001:db8::1]:443", "b.example:443", True),
        ("grpc://b.example", "ipv6:[2001:db8::1]:80", "b.example:80", False),
        ("grpc://c.example:1", "ipv6:[2001:db8::1]:1", "c.example:1", False),
        ("grpc://d.example:1", "ipv4:10.0.0.1:1", "d.example:1", False),
        ("grpc://10.0.0.9:50051", "ipv4:10.0.0.9:50051", "10.0.0.9:50051", False),
        ("grpc://[2001:DB8::2]:50051", "ipv6:[2001:db8::2]:50051", "[2001:db8::2]:50051", False),
        ("grpc://[::ffff:10.0.0.9]:50051", "ipv4:10.0.0.9:50051", "10.0.0.9:50051", False),
    ],
)
async def test_a_channel_is_told_addresses_and_the_name(url: str, target: str, authority: str, secure: bool) -> None:
    looked = await lookup(
        a_example="10.0.0.1 10.0.0.2",
        b_example="2001:db8::1",
        c_example="2001:db8::1 10.0.0.1",
        d_example="::ffff:10.0.0.1 2001:db8::1",
    ).grpc_target(url)
    assert (looked.target, looked.secure) == (target, secure)
    assert dict(looked.options) == {"grpc.default_authority": authority, "grpc.enable_http_proxy": 0}


@pytest.mark.parametrize(
    "url",
    [
        *(
            "grpc://evil.example:50051",
            "grpc://mixed.example:50051",
            "grpc://169.254.169.254:80",
            "grpc://10.0.0.1:50052",
        ),
        *("grpc://0x0a.1:50051", "grpc://user:hunter2@good.example:50051", "https+grpc://a", "good.example:50051"),
    ],
)
async def test_what_the_rules_do_not_allow_gets_no_channel(url: str) -> None:
    looking = lookup(
        "10.0.0.0/8:50051", good_example="10.0.0.1", evil_example="11.0.0.1", mixed_example="10.0.0.1 11.0.0.1"
    )
    assert (await looking.grpc_target("grpc://good.example:50051")).target == "ipv4:10.0.0.1:50051"
    with pytest.raises(TargetRefused) as caught:
        await looking.grpc_target(url)
    assert "hunter2" not in str(caught.value)


async def test_addresses_are_looked_up_and_checked() -> None:
    looking = lookup("10.0.0.0/8:50051", good_example="10.0.0.1", near_example="fe80::1%lo")
    assert [str(each) for each in await looking.addresses("good.example", 50051)] == ["10.0.0.1"]
    assert [str(each) for each in await looking.addresses("10.0.0.2", 50051)] == ["10.0.0.2"]
    for host, port in (
        ("good.example", 50052),
        ("10.0.0.2", 50052),
        ("11.0.0.1", 50051),
        ("10.1", 50051),
        ("::1", 50051),
        ("near.example", 50051),
    ):
        with pytest.raises(TargetRefused):
            await looking.addresses(host, port)


async def test_a_scheme_that_is_not_listed_gets_no_channel() -> None:
    looking = CheckedLookup(TargetRules.parse("", "https,grpcs"), Table({"a.example": [["10.0.0.1"]]}))
    assert (await looking.grpc_target("grpcs://a.example")).secure
    with pytest.raises(TargetRefused, match="grpcs, https"):
        await looking.grpc_target("grpc://a.example")


async def test_a_channel_calls_the_address_and_wants_the_certificate_of_the_name() -> None:
    ca = trustme.CA()
    credentials = grpc.ssl_channel_credentials(ca.cert_pem.bytes())
    async with health(ca.issue_cert("trainer.internal")) as port:
        looking = lookup(trainer_internal="127.0.0.1", other_internal="127.0.0.1")
        for name, expected in {"trainer.internal": True, "other.internal": False}.items():
            looked = await looking.grpc_target(f"grpcs://{name}:{port}")
            channel = grpc.aio.secure_channel(looked.target, credentials, options=looked.options)
            assert await serves(channel) is expected


async def test_a_channel_calls_under_the_name_of_the_url() -> None:
    heard = b""
    named = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heard
        writer.write(NO_SETTINGS)
        while chunk := await reader.read(65536):
            heard += chunk
            if f"trainer.internal:{port}".encode() in heard:
                named.set()
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    looked = await lookup(trainer_internal="127.0.0.1").grpc_target(f"grpc://trainer.internal:{port}")
    async with server, grpc.aio.insecure_channel(looked.target, options=looked.options) as channel:
        asking = asyncio.ensure_future(
            HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)  # type: ignore[no-untyped-call]
        )
        await asyncio.wait([asking, asyncio.ensure_future(named.wait())], return_when=asyncio.FIRST_COMPLETED)
        assert named.is_set()
        asking.cancel()


async def test_rebinding_after_the_lookup_wins_nothing() -> None:
    """The channel holds addresses. Only another lookup sees the second result, which is refused."""
    answers: Mapping[str, list[list[str]]] = {"b.example": [["127.0.0.1"], ["169.254.169.254"]]}
    looking = CheckedLookup(TargetRules(), Table(answers))
    async with health() as port:
        url = f"grpc://b.example:{port}"
        looked = await looking.grpc_target(url)
        assert await serves(grpc.aio.insecure_channel(looked.target, options=looked.options))
        with pytest.raises(TargetRefused):
            await looking.grpc_target(url)
        assert await serves(grpc.aio.insecure_channel(looked.target, options=looked.options))

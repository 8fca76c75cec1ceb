"""The caller, the trace context and the deadline of an HTTP request, as they reach the server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub, add_RolloutServiceServicer_to_server
from rollout_gateway.calls import CallMetadata, Rollouts, call_metadata
from rollout_gateway.channel import open_channel
from rollout_gateway.settings import GatewaySettings
from starlette.requests import Request

from tests.support.gateways import Gateway, http_client
from tests.support.scripted_server import ScriptedServer
from tests.support.server_client import refusal

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def metadata(*headers: tuple[str, str], key: str = "") -> dict[str, str]:
    """The metadata that is forwarded for these headers."""
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    request = Request({"type": "http", "headers": raw, "state": {"request_id": "id"}})
    found: CallMetadata = call_metadata(request, key)
    assert len(dict(found)) == len(found)
    assert found[0] == ("x-request-id", "id")
    return dict(found[1:])


def test_the_trace_travels_on_whole_or_not_at_all() -> None:
    parent = ("traceparent", TRACEPARENT)
    assert metadata(parent, ("tracestate", "a=1"), ("tracestate", ""), ("tracestate", "b=2")) == {
        "traceparent": TRACEPARENT,
        "tracestate": "a=1,b=2",
    }
    assert metadata(("tracestate", "a=1")) == {}
    assert metadata(parent, ("tracestate", "a=\xe9")) == dict([parent])
    assert metadata(parent, ("tracestate", "a=" + "1" * 5000)) == dict([parent])
    assert metadata(("traceparent", "\x00"), ("tracestate", "a=1")) == {}


def test_a_key_stands_in_only_where_there_is_none() -> None:
    assert metadata() == {}
    assert metadata(key="ours") == {"authorization": "Bearer ours"}
    for sent in ("Bearer theirs", "", "raw"):
        assert metadata(("authorization", sent), key="ours") == {"authorization": sent}
    for sent in ("Bearer \xe9", "Bearer " + "k" * 5000):
        assert metadata(("authorization", sent), key="ours") == {"authorization": ""}


def test_the_key_is_in_no_repr() -> None:
    settings = GatewaySettings(synchronous_key="sk-hidden")
    assert "sk-hidden" not in repr(settings)
    assert "sk-hidden" not in repr(Rollouts(None, settings))  # type: ignore[arg-type]


class Clocked(ScriptedServer):
    """Record the remaining time of each call."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.left: list[float | None] = []

    async def _enter(self, rpc: str, context: Any) -> None:
        self.left.append(context.time_remaining())
        await super()._enter(rpc, context)


@pytest.fixture
async def clocked() -> AsyncIterator[tuple[Clocked, Rollouts]]:
    """A server, and calls to it."""
    scripted, server = Clocked(), grpc.aio.server()  # type: ignore[abstract]  # rpcs that nobody calls
    add_RolloutServiceServicer_to_server(scripted, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield scripted, Rollouts(RolloutServiceStub(channel), GatewaySettings())
    await server.stop(None)


async def asking(rollouts: Rollouts, *headers: str, own: float | None = None) -> None:
    """Make a call with its own timeout during a request with these deadlines."""
    raw = [(b"grpc-timeout", value.encode()) for value in headers]

    request = Request({"type": "http", "headers": raw, "state": {"request_id": "id"}})
    await rollouts.calls(request).rpc.GetServerInfo(pb.GetServerInfoRequest(), timeout=own)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("1H", 3600), ("2M", 120), ("30S", 30), ("00005000m", 5), ("9000000u", 9), ("99999999H", 366 * 86400)],
)
async def test_deadlines_are_those_of_grpc(clocked: tuple[Clocked, Rollouts], header: str, seconds: float) -> None:
    scripted, rollouts = clocked
    await asking(rollouts, header)
    await asking(rollouts, header, own=1e9)
    await asking(rollouts, header, own=2.0)
    shortest = 2.0
    for found, most in zip(scripted.left, (seconds, seconds, shortest), strict=True):
        assert found is not None
        # gRPC sends deadlines in coarser units, rounded up.
        assert most / 2 < found < most * 1.1


@pytest.mark.parametrize("header", ["0H", "0n", "1n"])
async def test_a_deadline_that_has_passed_asks_nobody(clocked: tuple[Clocked, Rollouts], header: str) -> None:
    scripted, rollouts = clocked
    assert (await refusal(asking(rollouts, header))).code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert scripted.left == []


async def test_without_a_deadline_a_calls_own_timeout_holds(clocked: tuple[Clocked, Rollouts]) -> None:
    scripted, rollouts = clocked
    await asking(rollouts)
    await asking(rollouts, own=10.0)
    unbounded, bounded = scripted.left
    assert unbounded is None
    assert bounded is not None
    assert 5 < bounded < 11


@pytest.mark.parametrize(
    "header", ["", "30", "S", "30s", "30 S", "1.5S", "-1S", "123456789S", "1S2", "１S", "30S, 20S"]
)
async def test_a_malformed_deadline_is_400_and_calls_nobody(gateway: Gateway, header: str) -> None:
    for path in ("/health", "/tools", "/v1/rollouts"):
        response = await gateway.client.get(path, headers={b"grpc-timeout": header.encode()})
        assert response.status_code == 400
        assert "grpc-timeout must be 1 to 8 digits and a unit" in response.text
    assert gateway.server.metadata == {}


async def test_two_deadlines_are_malformed(gateway: Gateway) -> None:
    response = await gateway.client.get("/health", headers=[("grpc-timeout", "1S"), ("grpc-timeout", "2S")])
    assert response.status_code == 400


async def test_a_deadline_ends_the_call_and_leaves_the_rollout(gateway: Gateway) -> None:
    gateway.server.go.clear()
    response = await gateway.post(headers={"grpc-timeout": "200m"})
    assert (response.status_code, response.json()) == (504, {"detail": "The rollout server did not answer in time"})
    await gateway.server.detached.wait()
    assert gateway.server.acknowledged == []
    gateway.server.go.set()
    assert (await gateway.post(headers={"grpc-timeout": "100S"})).status_code == 200


async def test_the_next_request_on_the_connection_has_no_deadline(gateway: Gateway) -> None:
    limits = httpx.Limits(max_connections=1)
    url = f"http://{gateway.host}:{gateway.port}"
    async with http_client(url, limits=limits) as client:
        assert (await client.get("/tools", headers={"grpc-timeout": "0m"})).status_code == 504
        assert (await client.get("/tools")).status_code == 200

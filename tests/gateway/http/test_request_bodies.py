"""Request bodies: the key is checked first, memory and work are bounded, and large bodies are parsed off the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub, add_RolloutServiceServicer_to_server
from rollout_gateway import key_check
from rollout_gateway.app import create_app
from rollout_gateway.calls import CallMetadata, Calls
from rollout_gateway.channel import open_channel
from rollout_gateway.fleet import fleet
from rollout_gateway.http import request_body
from rollout_gateway.http.request_body import Overloaded, RequestBodies
from rollout_gateway.json_body import MAX_MESSAGES, InvalidBody, read_body, violation
from rollout_gateway.key_check import KeyCheck
from rollout_gateway.osmosis_http.body import RolloutBody
from rollout_gateway.settings import GatewaySettings
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from tests.support.example_bodies import EXAMPLE, INIT_EXAMPLE
from tests.support.gateways import Gateway, http_client, listening, serving
from tests.support.scripted_server import Refusal, ScriptedServer

STRANGER = Refusal(grpc.StatusCode.UNAUTHENTICATED, "Invalid or missing API key")
HEAD = "POST {} HTTP/1.1\r\nhost: gateway\r\n"
PLAIN = {"messages": [{"role": "user", "content": "?"}], "completions": {"url": "http://t"}}


def routes_with_a_body() -> list[str]:
    app = create_app(grpc.aio.insecure_channel("unix:nowhere"))
    return [
        path.replace("{uid}", "u")
        for path, methods in app.openapi()["paths"].items()
        # Model endpoints have keys and errors of their own, and tests: tests/gateway/model_api.
        if "requestBody" in methods.get("post", {}) and not path.startswith("/r/")
    ]


@pytest.fixture(scope="module")
def forever() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_check, "_ACCEPTED_SECONDS", 1e9)
        yield


async def answer(port: int, content: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(content.encode())
        head = await reader.readuntil(b"\r\n\r\n")
        return head + await reader.readuntil(b"}")
    finally:
        writer.close()


@pytest.mark.parametrize("framing", ["content-length: 1000", "content-length: 1000\r\nexpect: 100-continue",
                                     "transfer-encoding: chunked", "content-length: 100000000"])  # fmt: skip
async def test_a_wrong_key_is_refused_before_the_body_is_sent(gateway: Gateway, framing: str) -> None:
    gateway.server.refusals["ListAgents"] = STRANGER
    paths = routes_with_a_body()
    assert len(paths) == 6
    for path in paths:
        got = await answer(gateway.port, f"{HEAD.format(path)}{framing}\r\n\r\n")
        assert got.startswith(b"HTTP/1.1 401 "), got
        assert b"Invalid or missing API key" in got
    assert gateway.server.requests == gateway.server.starts == []


async def test_a_key_is_looked_at_once_for_many_bodies(gateway: Gateway, forever: None) -> None:
    calls = gateway.server.calls
    asked = [gateway.init({**INIT_EXAMPLE, "rollout_id": f"r{number}"}) for number in range(20)]
    assert {reply.status_code for reply in await asyncio.gather(*asked)} == {202}
    assert calls.count("ListAgents") == 1
    gateway.server.refusals["ListAgents"] = STRANGER
    assert (await gateway.init(headers={"authorization": "Bearer another"})).status_code == 401
    assert calls.count("ListAgents") == 2
    assert (await gateway.init()).status_code == 202


async def test_a_key_is_looked_at_again_after_a_while(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_check, "_ACCEPTED_SECONDS", 0.0)
    assert (await gateway.init()).status_code == 202
    gateway.server.refusals["ListAgents"] = STRANGER
    assert (await gateway.init()).status_code == 401


async def test_accepted_keys_are_bounded(
    server: ScriptedServer, address: str, forever: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_check, "_MOST_ACCEPTED", 3)
    async with stub(address) as rpcs:
        keys = KeyCheck(rpcs, 10.0)
        for number in range(20):
            await keys.demand(calls(rpcs, (("authorization", f"Bearer {number}"),)))
            assert len(keys._accepted) <= 3
    assert keys._checks == {}


@asynccontextmanager
async def silent(server: ScriptedServer) -> AsyncIterator[None]:
    """Make the server accept calls without responding."""
    released = asyncio.Event()

    async def enter(rpc: str, context: Any) -> None:
        await released.wait()

    server._enter = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        released.set()


async def test_who_has_a_deadline_does_not_wait_for_the_key_beyond_it(server: ScriptedServer, address: str) -> None:
    async with (
        silent(server),
        serving(address, GatewaySettings(call_seconds=3600.0)) as (host, port),
        http_client(f"http://{host}:{port}") as client,
    ):
        reply = await client.post("/v1/rollouts", json=PLAIN, headers={"grpc-timeout": "50m"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (504, "DEADLINE_EXCEEDED")


async def test_one_server_of_a_fleet_that_hangs_delays_no_body(
    server: ScriptedServer, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_SUMMARY_SECONDS", 3600.0)
    async with one_of_two(address) as (hanging, stub), silent(hanging):
        await KeyCheck(stub, 3600.0).demand(calls(stub))
        server.refusals["ListAgents"] = STRANGER
        with pytest.raises(grpc.aio.AioRpcError, match="Invalid or missing API key"):
            await KeyCheck(stub, 3600.0).demand(calls(stub))


@asynccontextmanager
async def one_of_two(address: str) -> AsyncIterator[tuple[ScriptedServer, Any]]:
    """Another server, and a fleet of it and the one at the address."""
    another, grpc_server = ScriptedServer(), grpc.aio.server()  # type: ignore[abstract]  # rpcs that nobody calls
    add_RolloutServiceServicer_to_server(another, grpc_server)
    port = grpc_server.add_insecure_port("127.0.0.1:0")
    await grpc_server.start()
    async with open_channel(f"127.0.0.1:{port}") as first, open_channel(address) as second:
        yield another, fleet.stub_of([first, second])
    await grpc_server.stop(None)


@asynccontextmanager
async def stub(address: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield RolloutServiceStub(channel)


def calls(server: Any, metadata: CallMetadata = ()) -> Calls:
    """Calls of a request without a deadline."""
    return Calls(server, metadata, None, server, 10.0)


class Host:
    """An application that only reads bodies."""

    def __init__(self, server: Any, budget: int) -> None:
        self.server = server
        self.intake = RequestBodies(KeyCheck(server, 10.0), budget)
        self.threads: list[threading.Thread] = []
        self.failures: list[type[BaseException]] = []

    def parse(self, content: bytes) -> int:
        self.threads.append(threading.current_thread())
        return len(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            text = str(await self.intake.read(request, calls(self.server), self.parse))
        except (Overloaded, InvalidBody, ClientDisconnect) as error:
            self.failures.append(type(error))
            text = type(error).__name__
        await PlainTextResponse(text)(scope, receive, send)


async def until(done: Any) -> None:
    while not done():  # noqa: ASYNC110 - no event reports it
        await asyncio.sleep(0.01)


async def test_bodies_under_way_hold_no_more_than_their_budget(server: ScriptedServer, address: str) -> None:
    async with stub(address) as rpcs, listening(host := Host(rpcs, 50_000)) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write((HEAD.format("/") + "content-length: 40001\r\n\r\n").encode() + b"1" * 40_000)
        await until(lambda: host.intake._held == 40_000)
        for size, text in ((10_001, "Overloaded"), (10_000, "10000"), (10_001, "Overloaded")):
            got = await whole(port, b"1" * size)
            assert got == text.encode()
            assert host.intake._held == 40_000
        writer.write(b"1")
        await reader.readuntil(b"40001")
        assert host.intake._held == 0
        writer.close()


async def whole(port: int, content: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = HEAD.format("/") + f"connection: close\r\ncontent-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        return (await reader.read()).rpartition(b"\r\n\r\n")[2]
    finally:
        writer.close()


async def test_who_hangs_up_gives_back_what_was_held(server: ScriptedServer, address: str) -> None:
    async with stub(address) as rpcs, listening(host := Host(rpcs, 50_000)) as (_, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write((HEAD.format("/") + "content-length: 40001\r\n\r\n").encode() + b"1" * 40_000)
        await until(lambda: host.intake._held == 40_000)
        writer.close()
        await until(lambda: host.intake._held == 0)
    assert host.failures == [ClientDisconnect]


SMALL, LARGE, MANY = b'"' + b"a" * 65_000 + b'"', b'"' + b"a" * 66_000 + b'"', b"[" + b"1," * 2_500 + b"1]"


@pytest.mark.parametrize(("content", "here"), [(SMALL, True), (LARGE, False), (MANY, False)])
async def test_what_is_large_is_parsed_off_the_event_loop(
    server: ScriptedServer, address: str, content: bytes, here: bool
) -> None:
    async with stub(address) as rpcs, listening(host := Host(rpcs, 10**6)) as (_, port):
        assert await whole(port, content) == str(len(content)).encode()
    assert [thread is threading.current_thread() for thread in host.threads] == [here]


async def test_too_many_values_never_reach_the_parser(server: ScriptedServer, address: str) -> None:
    async with stub(address) as rpcs, listening(host := Host(rpcs, 10**8)) as (_, port):
        ones = b"[" + b"1," * (request_body.MAX_VALUES - 2)
        assert await whole(port, ones + b"1]") == str(len(ones) + 2).encode()
        assert await whole(port, ones + b"1,1,1]") == b"InvalidBody"
        assert await whole(port, b"[" * 257 + b"]" * 257) == b"InvalidBody"
    assert len(host.threads) == 1


async def test_an_overloaded_gateway_says_when_to_come_back(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object) -> None:
        raise Overloaded

    monkeypatch.setattr(RequestBodies, "read", full)
    for path in routes_with_a_body():
        reply = await gateway.client.post(path, json={})
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        assert "Retry-After" in reply.text
        assert ("error" in reply.json()) == path.startswith(("/v1/rollouts", "/v1/groups"))


def faults(body: dict[str, Any]) -> list[dict[str, Any]]:
    with pytest.raises(InvalidBody) as refused:
        read_body(json.dumps(body).encode(), RolloutBody)
    return refused.value.violations


def test_the_first_faults_are_listed_and_the_others_counted() -> None:
    listed = [violation("x", (number,), "is wrong") for number in range(5_000)]
    found = InvalidBody(listed).violations
    assert found[:20] == listed[:20]
    assert found[20:] == [{"type": "too_many", "loc": ("body",), "msg": "4980 more are not listed"}]
    assert InvalidBody(listed[:20]).violations == listed[:20]


def test_lists_are_looked_at_up_to_their_first_fault() -> None:
    assert [each["loc"] for each in faults({**EXAMPLE, "messages": [1] * 5_000})] == [("body", "messages", 0)]
    message = {"role": "user", "content": [1] * 5_000, "tool_calls": [1] * 5_000}
    found = faults({**EXAMPLE, "messages": [message], "sampling_params": {"stop": [1] * 5_000}})
    assert len(found) == 4  # the content is also checked for not being a text
    assert not [each for each in found if isinstance(each["loc"][-1], int) and each["loc"][-1] > 0]


@pytest.mark.parametrize(
    ("path", "body"), [("/rollout", EXAMPLE), ("/v1/rollout/init", INIT_EXAMPLE), ("/v1/rollouts", PLAIN)]
)
async def test_messages_are_counted_before_they_are_looked_at(gateway: Gateway, path: str, body: Any) -> None:
    reply = await gateway.client.post(path, json={**body, "messages": [1] * (MAX_MESSAGES + 1)})
    assert reply.status_code == 422
    assert reply.text.count("At most 10000 messages") in (1, 2)
    assert "Input should" not in reply.text


async def test_a_client_that_leaves_in_its_body_is_no_fault(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    for path in routes_with_a_body():
        _, writer = await asyncio.open_connection(gateway.host, gateway.port)
        writer.write((HEAD.format(path) + "content-length: 1000\r\n\r\n{").encode())
        await writer.drain()
        writer.close()
    paths = [path.replace("/u/", "/{uid}/") for path in routes_with_a_body()]
    expected = {f'method="POST",route="{path}",status="499"' for path in paths}
    text = ""
    while not all(each in text for each in expected):
        text = (await gateway.client.get("/metrics")).text
        assert 'status="500"' not in text
        await asyncio.sleep(0.02)
    assert "ERROR" not in caplog.text
    assert "Traceback" not in caplog.text

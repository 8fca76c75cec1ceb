"""Limits of an HTTP port: heads, bodies, time and connections, over raw sockets."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from rollout_gateway.app import create_app
from rollout_gateway.channel import open_channel
from rollout_gateway.http.protocol import ConnectionLimits
from rollout_gateway.http.serve import HttpListener, Listening
from rollout_gateway.settings import GatewaySettings
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.support.scripted_server import ScriptedServer

LIMITS = ConnectionLimits(url_bytes=200, fields=10, field_bytes=1000)
GET = b"GET /health HTTP/1.1\r\nhost: gateway\r\n"
ASK = b"POST /rollout HTTP/1.1\r\nhost: gateway\r\n"


@asynccontextmanager
async def listening(app: ASGIApp, limits: ConnectionLimits = LIMITS) -> AsyncIterator[int]:
    listener = HttpListener(app, Listening("127.0.0.1", 0, limits=limits, grace_seconds=0.2))
    try:
        yield await listener.start()
    finally:
        await listener.stop()


@asynccontextmanager
async def gateway(address: str, limits: ConnectionLimits = LIMITS, body_seconds: float = 60) -> AsyncIterator[int]:
    async with open_channel(address) as channel:
        app = create_app(channel, GatewaySettings(body_seconds=body_seconds))
        async with listening(app, limits) as port:
            yield port


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def ask(self, content: bytes) -> tuple[int, bytes]:
        """Send bytes and read a response: its status and body."""
        self.writer.write(content)
        return await self.answer()

    async def answer(self) -> tuple[int, bytes]:
        """Read a response."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
        return int(head.split()[1]), await self._reader.readexactly(int(fields[b"content-length"]))

    async def closed(self) -> bool:
        """Whether the server closed the connection without further bytes."""
        try:
            return await self._reader.read() == b""
        except ConnectionResetError:
            return True


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


OVER = {
    "url": (b"GET /" + b"a" * 300 + b" HTTP/1.1\r\nhost: gateway\r\n\r\n", 414),
    "url that does not end": (b"GET /" + b"a" * 300, 414),
    "query": (b"GET /health?" + b"a" * 300 + b" HTTP/1.1\r\nhost: gateway\r\n\r\n", 414),
    "fields": (GET + b"a: b\r\n" * 10 + b"\r\n", 431),
    "field": (GET + b"a: " + b"b" * 1000 + b"\r\n\r\n", 431),
    "field that does not end": (GET + b"a: " + b"b" * 1500, 431),
    "field without a name": (GET + b"a" * 1500, 431),
    "many fields that do not end": (GET + b"a: b\r\n" * 50, 431),
    "method": (b"A" * 1500, 400),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00", 400),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n" + b" " * 20, 400),
    "two hosts": (GET + b"Host: another\r\n\r\n", 400),
    "two keys": (GET + b"authorization: Bearer a\r\nAuthorization: Bearer a\r\n\r\n", 400),
    "HTTP/0.9": (b"GET /health\r\n\r\n" + b" " * 30, 400),
    "HTTP/0.9 by name": (b"GET /health HTTP/0.9\r\nhost: gateway\r\n\r\n", 400),
    "HTTP/2 by name": (b"GET /health HTTP/2.0\r\nhost: gateway\r\n\r\n", 400),
}
REASONS = {
    "no host": "The header Host is missing",
    "two hosts": "The header Host was sent more than once",
    "two keys": "The header Authorization was sent more than once",
    "HTTP/0.9": "HTTP/0.9 is not supported: send HTTP/1.1",
}


@pytest.mark.parametrize(("content", "status"), OVER.values(), ids=OVER.keys())
async def test_a_head_over_a_limit_is_refused_and_the_connection_closed(
    server: ScriptedServer, address: str, content: bytes, status: int
) -> None:
    async with gateway(address) as port, connected(port) as client:
        for part in (content[:40], content[40:]):
            client.writer.write(part)
            await asyncio.sleep(0.01)
        found, body = await client.answer()
        assert (found, json.loads(body).keys()) == (status, {"detail"})
        client.writer.write(b"more" * 1000)
        assert await client.closed()
    assert server.metadata == {}


@pytest.mark.parametrize("name", REASONS)
async def test_a_head_that_is_refused_says_why(server: ScriptedServer, address: str, name: str) -> None:
    async with gateway(address) as port, connected(port) as client:
        assert json.loads((await client.ask(OVER[name][0]))[1]) == {"detail": REASONS[name]}


async def test_http_1_0_needs_no_host(server: ScriptedServer, address: str) -> None:
    async with gateway(address) as port, connected(port) as client:
        assert (await client.ask(b"GET /health HTTP/1.0\r\n\r\n"))[0] == 200


async def test_a_head_at_the_limits_is_served(server: ScriptedServer, address: str) -> None:
    async with gateway(address) as port, connected(port) as client:
        url = b"GET /health?" + b"a" * (200 - len("/health?")) + b" HTTP/1.1\r\nhost: gateway\r\n"
        fields = b"".join(b"a%d: %s\r\n" % (number, b"b" * 50) for number in range(9))
        for _ in range(2):
            assert (await client.ask(url + fields + b"\r\n"))[0] == 200


async def test_a_head_that_does_not_come_is_waited_for_only_so_long(server: ScriptedServer, address: str) -> None:
    limits = replace(LIMITS, head_seconds=0.1)
    async with gateway(address, limits) as port:
        async with connected(port) as silent:
            assert await silent.closed()
        async with connected(port) as slow:
            status, body = await slow.ask(GET)
            assert (status, json.loads(body)) == (408, {"detail": "Request Timeout"})
            assert await slow.closed()
        async with connected(port) as used:
            assert (await used.ask(GET + b"\r\n"))[0] == 200
            # By itself, it would keep uvicorn waiting forever.
            used.writer.write(b"\r\n")
            assert await used.closed()


async def test_an_answer_may_take_longer_than_a_head(server: ScriptedServer, address: str) -> None:
    server.go.clear()
    limits = replace(LIMITS, head_seconds=0.05)
    async with gateway(address, limits) as port, connected(port) as client:
        content = json.dumps(
            {
                "rollout_id": "r",
                "server_url": "http://t",
                "messages": [{"role": "user", "content": "?"}],
                "sampling_params": {},
                "tokenizer_name": "m",
            }
        ).encode()
        asked = asyncio.create_task(client.ask(ASK + b"content-length: %d\r\n\r\n" % len(content) + content))
        await server.started.wait()
        # The next request, sent in pieces before the response.
        for piece in (b"\r\n", GET, b"\r\n"):
            client.writer.write(piece)
            await asyncio.sleep(0.12)
        assert not asked.done()
        server.go.set()
        assert (await asked)[0] == 200
        assert (await client.answer())[0] == 200


async def test_a_body_that_comes_too_slowly_is_408(server: ScriptedServer, address: str) -> None:
    async with gateway(address, body_seconds=0.1) as port:
        for path, shape in ((b"/rollout", {"detail"}), (b"/v1/rollouts", {"error"})):
            async with connected(port) as client:
                head = b"POST %s HTTP/1.1\r\nhost: gateway\r\ncontent-length: 10\r\n\r\n{" % path
                status, body = await client.ask(head)
                assert (status, json.loads(body).keys()) == (408, shape)
                assert b"did not arrive within 0.1 s" in body
                assert await client.closed()
    assert server.requests == server.starts == []


async def never(scope: Scope, receive: Receive, send: Send) -> None:
    """Respond without reading the request."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


async def test_a_body_that_nobody_reads_ends_the_connection_too() -> None:
    limits = replace(LIMITS, body_seconds=-9.9)  # the limit has a tolerance of 10 s
    async with listening(never, limits) as port, connected(port) as client:
        assert (await client.ask(ASK + b"content-length: 1000\r\n\r\n"))[0] == 200
        assert await client.closed()


async def test_what_is_no_body_is_limited_between_chunks(server: ScriptedServer, address: str) -> None:
    async with gateway(address) as port, connected(port) as client:
        client.writer.write(ASK + b"transfer-encoding: chunked\r\n\r\n1")
        await asyncio.sleep(0.01)
        assert (await client.ask(b";" + b"a" * 1500))[0] == 431
        assert await client.closed()


TRAILERS = {"small": (b"authorization: Bearer late\r\n", True), "large": (b"a: b\r\n" * 50, False)}


@pytest.mark.parametrize(("trailer", "taken"), TRAILERS.values(), ids=TRAILERS.keys())
async def test_trailers_never_become_headers(trailer: bytes, taken: bool) -> None:
    seen: list[list[tuple[bytes, bytes]]] = []

    async def remembering(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive()).get("more_body", False):
            pass
        seen.append(scope["headers"])
        if message["type"] != "http.disconnect":
            await never(scope, receive, send)

    async with listening(remembering) as port, connected(port) as client:
        client.writer.write(ASK + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n" + trailer + b"\r\n")
        assert (await client.answer())[0] == (200 if taken else 431)
    assert [name for name, _ in seen[0]] == [b"host", b"transfer-encoding"]


async def test_connections_over_the_limit_are_refused_and_probes_are_not(server: ScriptedServer, address: str) -> None:
    limits = replace(LIMITS, connections=2)
    async with gateway(address, limits) as port, connected(port) as first, connected(port) as second:
        # Idle connections count as well, because the port cannot distinguish them from event streams.
        assert (await first.ask(GET + b"\r\n"))[0] == 200
        assert (await second.ask(GET + b"\r\n"))[0] == 200
        async with connected(port) as third:
            for path in (b"/health", b"/healthz", b"/readyz?verbose"):
                assert (await third.ask(b"GET %s HTTP/1.1\r\nhost: g\r\n\r\n" % path))[0] == 200
            status, body = await third.ask(b"GET /tools HTTP/1.1\r\nhost: g\r\n\r\n")
            assert (status, json.loads(body)) == (503, {"detail": "Too many connections are open: try again later"})
            assert await third.closed()
        assert (await second.ask(b"GET /tools HTTP/1.1\r\nhost: g\r\n\r\n"))[0] == 200


async def test_offers_of_other_protocols_are_passed_over(
    server: ScriptedServer, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    offer = b"connection: upgrade, http2-settings\r\nupgrade: %s\r\nhttp2-settings: AAMAAABk\r\n\r\n"
    async with gateway(address) as port, connected(port) as client:
        for protocol in (b"h2c", b"websocket", b"h2c"):
            assert (await client.ask(GET + offer % protocol))[0] == 200
        assert (await client.ask(GET + b"\r\n"))[0] == 200
    assert caplog.text == ""


OFFER = b"connection: keep-alive, Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
BODIES = {
    "length": b"content-length: 35\r\n\r\n" + GET[:35],
    "chunks": b"transfer-encoding: chunked\r\n\r\n23\r\n" + GET[:35] + b"\r\n0\r\n\r\n",
}


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    names = [name.decode() for name, _ in scope["headers"]]
    await JSONResponse([scope["method"], scope["path"], body.decode(), names])(scope, receive, send)


@pytest.mark.parametrize("size", [1, 60, 100_000])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
async def test_the_body_behind_an_offer_of_another_protocol_is_a_body(body: bytes, size: int) -> None:
    content = (ASK + OFFER + b"empty:\r\n" + body) * 2 + GET + OFFER + b"\r\n" + GET + b"\r\n"
    async with listening(echo) as port, connected(port) as client:
        for start in range(0, len(content), size):
            client.writer.write(content[start : start + size])
            await asyncio.sleep(0)
        for _ in range(2):
            method, path, found, names = json.loads((await client.answer())[1])
            assert (method, path, found) == ("POST", "/rollout", GET[:35].decode())
            assert names[:4] == ["host", "connection", "http2-settings", "empty"]
        for _ in range(2):
            assert json.loads((await client.answer())[1])[:3] == ["GET", "/health", ""]


async def test_the_body_behind_an_offer_may_come_later() -> None:
    async with listening(echo) as port, connected(port) as client:
        head, _, body = BODIES["length"].partition(b"\r\n\r\n")
        client.writer.write(ASK + OFFER + head + b"\r\n\r\n")
        await asyncio.sleep(0.05)
        assert json.loads((await client.ask(body))[1])[2] == body.decode()


async def test_limits_of_a_head_hold_with_an_offer_of_another_protocol() -> None:
    for content, status in [value for name, value in OVER.items() if name in ("fields", "field", "two hosts")]:
        async with listening(echo) as port, connected(port) as client:
            assert (await client.ask(content.replace(b"\r\n", b"\r\n" + OFFER, 1)))[0] == status
            assert await client.closed()
    async with listening(echo) as port, connected(port) as client:
        client.writer.write(ASK + OFFER + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n" + b"a: b\r\n" * 50)
        assert (await client.answer())[0] == 431
        assert await client.closed()


@pytest.mark.parametrize("pause", [0, 0.05])
async def test_a_client_that_leaves_is_noticed_behind_another_request(pause: float) -> None:
    left: asyncio.Queue[str] = asyncio.Queue()

    async def waiting(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left.put_nowait(scope["path"])

    async with listening(waiting) as port:
        async with connected(port) as client:
            client.writer.write(GET + b"\r\n")
            await asyncio.sleep(pause)
            client.writer.write(GET.replace(b"health", b"another") + b"\r\n")
            await asyncio.sleep(0.05)
            assert left.empty()
        assert await asyncio.wait_for(left.get(), 2) == "/health"
    assert left.empty()


@pytest.mark.parametrize(("number", "served"), [(17, True), (18, False)])
async def test_only_so_many_requests_wait_for_a_response(number: int, served: bool) -> None:
    async with listening(echo) as port, connected(port) as client:
        client.writer.write((GET + b"\r\n") * number)
        if not served:
            assert await client.closed()
        else:
            for _ in range(number):
                assert (await client.answer())[0] == 200


BROKEN = {
    "identity": b"transfer-encoding: identity\r\n\r\n{}",
    "gzip": b"transfer-encoding: gzip\r\n\r\n{}",
    "huge chunk": b"transfer-encoding: chunked\r\n\r\nfffffffffffffffffff\r\n{}\r\n0\r\n\r\n",
    "no line break": b"transfer-encoding: chunked\r\n\r\n2\r\n{}0\r\n\r\n",
    "asks first": b"expect: 100-continue\r\ntransfer-encoding: gzip\r\n\r\n",
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("offer", [b"", OFFER], ids=["", "offer"])
async def test_a_body_that_cannot_be_read_is_400(
    server: ScriptedServer, address: str, caplog: pytest.LogCaptureFixture, offer: bytes, body: bytes
) -> None:
    log = logging.getLogger("uvicorn.error")
    log.addHandler(caplog.handler)  # an earlier test may have kept its records from the root logger
    caplog.set_level(logging.WARNING, log.name)
    async with gateway(address) as port, connected(port) as client:
        assert (await client.ask(GET + b"\r\n"))[0] == 200
        status, content = await client.ask(ASK + offer + body)
        assert (status, json.loads(content)) == (400, {"detail": "Bad Request"})
        assert await client.closed()
    log.removeHandler(caplog.handler)
    assert {each.message for each in caplog.records} == {"Invalid HTTP request received."}


async def test_a_body_that_cannot_be_read_gets_no_response_that_another_request_is_due() -> None:
    for content in (GET + b"\r\n" + ASK + BROKEN["gzip"], GET + b"\r\nno HTTP"):
        async with listening(echo) as port, connected(port) as client:
            client.writer.write(content)
            assert await client.closed()


async def test_the_port_tells_nothing_about_what_serves_it(server: ScriptedServer, address: str) -> None:
    async with gateway(address) as port, connected(port) as client:
        client.writer.write(GET + b"x-forwarded-for: 10.0.0.1\r\nconnection: close\r\n\r\n")
        head = (await client._reader.read()).partition(b"\r\n\r\n")[0].lower()
    assert b"server:" not in head
    assert b"date:" in head


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_answers_are_sent_at_once(host: str) -> None:
    kept: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        (connection,) = listener._server.server_state.connections
        kept.append(connection.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        await JSONResponse({})(scope, receive, send)

    listener = HttpListener(app, Listening(host, 0, grace_seconds=0.2))
    reader, writer = await asyncio.open_connection(host, await listener.start())
    try:
        await Client(reader, writer).ask(GET + b"\r\n")
    finally:
        writer.close()
        await listener.stop()
    assert kept == [1]

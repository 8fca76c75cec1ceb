"""Random inputs for every port of a real server: bodies, heads, bytes that are not HTTP, and bytes for gRPC.

A 500, an error in the log or a dead server fails. A refusal that does not name its reason fails, too.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from urllib.parse import quote

import grpc
import httpx
from osmosis.rollout.v1 import rollout_service_pb2 as pb

from tests.hostile.attacks.http import PATHS, PLAIN, raw
from tests.hostile.target import NOWHERE, Target, target
from tests.support.example_bodies import EXAMPLE, INIT_EXAMPLE

_AT_ONCE = 16
_SETTINGS = {"ROLLOUT_MAX_SECONDS": "0.1", "ROLLOUT_MAX_RECORDS": "200"}
_SERVICE = pb.DESCRIPTOR.services_by_name["RolloutService"]
_FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE)
_BODIES = [
    json.dumps({**EXAMPLE, "server_url": NOWHERE, "tokenizer_name": "toy"}).encode(),
    json.dumps({**INIT_EXAMPLE, "server_url": NOWHERE}).encode(),
    json.dumps(PLAIN).encode(),
    b'{"all":true,"reason":"fuzzed"}',
    b'{"reason":"fuzzed"}',
]
_PIECES = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\x00", b"\xff", b"null", b"1e999", b"-0", b"NaN", b'"\\ud800"',
           b"9" * 5000, b"[" * 300, b'{"a":' * 300, b"\xf0\x9f\x94\x91", b'"role":', b"true", b" " * 1000]  # fmt: skip
_LINES = [b"host: a", b"host:", b"content-length: 5", b"content-length: -1", b"transfer-encoding: chunked", b"a" * 3000,
          b"expect: 100-continue", b"authorization: \xff", b": b", b"a\x00: b", b"connection: close", b"upgrade: h2c",
          b"grpc-timeout: 1x", b"x-request-id: \x7f", b" folded", b"traceparent: 00"]  # fmt: skip
_METHODS = [b"GET", b"POST", b"PUT", b"OPTIONS", b"CONNECT", b"PRI", b"get", b"\xff"]
_TARGETS = [
    b"/healthz",
    b"/v1/rollouts",
    b"/rollout",
    b"*",
    b"http://a/b",
    b"//",
    b"/%ff",
    b"/\x80",
    b"/v1/rollouts/../x",
    b"?",
]
_VERSIONS = [b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/1", b"", b"RTSP/1.0"]

Send = Callable[[Target, random.Random, grpc.aio.Channel], Awaitable[str]]


def mutated(chance: random.Random, content: bytes) -> bytes:
    """The content with a part replaced, repeated or cut."""
    made = bytearray(content)
    for _ in range(chance.randint(0, 3)):
        place = chance.randrange(len(made) + 1)
        end = place + chance.choice((0, 0, 1, 5, 50))
        made[place:end] = chance.choice((chance.choice(_PIECES), chance.randbytes(4), bytes(made[end : end + 20])))
    return bytes(made[: chance.randrange(len(made) + 1)] if chance.random() < 0.1 else made)


async def _body(victim: Target, chance: random.Random, _: grpc.aio.Channel) -> str:
    number = chance.randrange(len(PATHS))
    reply = await victim.post(PATHS[number], mutated(chance, _BODIES[number]), key=chance.random() < 0.95)
    _judge_reply(reply)
    return f"body {reply.status_code}"


async def _query(victim: Target, chance: random.Random, _: grpc.aio.Channel) -> str:
    query = mutated(chance, b"page_size=5&state=running&label=a%3Db&view=full&page_token=abc&wait=0")
    path = chance.choice(
        ("/v1/rollouts", "/v1/rollouts/u", "/v1/rollouts/u/events", "/tools", "/v1/agents", "/metrics")
    )
    reply = await victim.client.get(f"{path}?{quote(query, safe='=&%')}", headers=victim.headers)
    _judge_reply(reply)
    return f"query {reply.status_code}"


def _judge_reply(reply: httpx.Response) -> None:
    assert reply.status_code not in (500, 501, 502, 504), reply.text
    assert "Traceback" not in reply.text
    if reply.status_code >= 400:
        found = reply.json()
        reason = found["error"]["message"] if "error" in found else found.get("detail") or found.get("status")
        assert reason, reply.text


async def _head(victim: Target, chance: random.Random, _: grpc.aio.Channel) -> str:
    line = b" ".join(chance.choice(words) for words in (_METHODS, _TARGETS, _VERSIONS))
    fields = [*chance.sample(_LINES, chance.randint(0, 5)), b"connection: close"]
    head = b"\r\n".join([line, *fields, b"", b""])
    content = head + chance.choice((b"", b"{}", b"5\r\n{}{}}\r\n0\r\n\r\n"))
    return _judged_bytes(await _answer(victim, mutated(chance, content) if chance.random() < 0.5 else content))


async def _bytes(victim: Target, chance: random.Random, _: grpc.aio.Channel) -> str:
    start = chance.choice((b"", b"GET / HTTP/1.1\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01"))
    return _judged_bytes(await _answer(victim, start + chance.randbytes(chance.randint(1, 300))))


async def _answer(victim: Target, content: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", victim.serving.http_port)
    try:
        writer.write(content)
        writer.write_eof()
        return await asyncio.wait_for(reader.read(), 0.3)
    except (TimeoutError, ConnectionError):
        return b""  # the server waits for more, or the connection is closed
    finally:
        writer.close()


def _judged_bytes(got: bytes) -> str:
    status = got[9:12].decode("ascii", "replace") if got.startswith(b"HTTP/1.1 ") else "nothing"
    assert status not in ("500", "501", "502", "504"), got
    assert b"Traceback" not in got
    return f"bytes {status}"


async def _rpc(victim: Target, chance: random.Random, channel: grpc.aio.Channel) -> str:
    name = chance.choice(sorted(_SERVICE.methods_by_name))
    start = pb.StartRolloutRequest()
    start.spec.rollout_id = "fuzzed"
    start.spec.messages.add().json = '{"role":"user","content":"?"}'
    start.spec.completions.url = NOWHERE
    content = {"StartRollout": start, "RunRollout": pb.RunRolloutRequest(start=start)}.get(
        name, pb.GetRolloutRequest(uid="u")
    )
    payload = (
        mutated(chance, content.SerializeToString())
        if chance.random() < 0.8
        else chance.randbytes(chance.randint(0, 80))
    )
    path, streams = f"/{_SERVICE.full_name}/{name}", _SERVICE.methods_by_name[name].server_streaming
    try:
        if streams:
            call: Any = channel.unary_stream(path)(payload, metadata=victim.metadata, timeout=5)
            async for _ in call:
                pass
        else:
            unary: Any = channel.unary_unary(path)
            await unary(payload, metadata=victim.metadata, timeout=5)
    except grpc.aio.AioRpcError as error:
        return _judged_status(error)
    return "rpc OK"


def _judged_status(error: grpc.aio.AioRpcError) -> str:
    assert error.code() not in _FAULTS, error
    assert error.details(), error
    return f"rpc {error.code().name}"


_KINDS: list[tuple[Send, int]] = [(_body, 40), (_query, 15), (_head, 15), (_bytes, 5), (_rpc, 25)]


async def fuzz(inputs: int, seed: int) -> Counter[str]:
    """Send this many inputs to a fresh server and count the responses. Raises AssertionError with the seed of the input."""
    seeds: Iterator[int] = iter(range(seed * 10**9, seed * 10**9 + inputs))
    found: Counter[str] = Counter()
    async with (
        target(**_SETTINGS) as victim,
        grpc.aio.insecure_channel(f"127.0.0.1:{victim.serving.grpc_port}") as channel,
    ):

        async def sender() -> None:
            for each in seeds:
                chance = random.Random(each)
                (send,) = chance.choices([kind for kind, _ in _KINDS], [weight for _, weight in _KINDS])
                try:
                    found[await send(victim, chance, channel)] += 1
                except Exception as error:
                    raise AssertionError(f"input {each} of {send.__name__}: {error}") from error

        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_ONCE):
                group.create_task(sender())
        assert await victim.healthy()
        assert victim.faults() == []
        assert (await raw(victim.serving.http_port, b"GET /healthz HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    assert sum(found.values()) == inputs
    return found

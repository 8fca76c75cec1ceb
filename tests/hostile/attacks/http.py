"""Attacks by clients over HTTP/1.1."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable

import httpx

from tests.hostile.attacks import attack
from tests.hostile.target import NOWHERE, Target
from tests.support.example_bodies import EXAMPLE, INIT_EXAMPLE

MIB = 1 << 20
PLAIN = {"messages": [{"role": "user", "content": "?"}], "completions": {"url": NOWHERE}, "tokenizer": {"name": "toy"}}
PATHS = ("/rollout", "/v1/rollout/init", "/v1/rollouts", "/v1/rollouts/cancel", "/v1/rollouts/u/cancel")


def ones(size: int) -> bytes:
    """A list of ones as the messages of a body, about this many bytes long."""
    return b'{"messages":[' + b"1," * (size // 2 - 20) + b"1]}"


def said(replies: Iterable[httpx.Response]) -> str:
    """The count of each status, and the beginning of one response."""
    replies = list(replies)
    counts = ", ".join(f"{status} x {count}" for status, count in Counter(r.status_code for r in replies).items())
    return f"{counts}: {replies[0].text[:100]}"


def refused(reply: httpx.Response, status: int) -> str:
    """The server's error text. Fails for another status, and for a missing or very long text."""
    assert reply.status_code == status, reply.text[:500]
    assert 10 < len(reply.content) < 8192
    return said([reply])


@attack("4 MiB of wrong messages to /v1/rollout/init, no key")
async def _(target: Target) -> str:
    return refused(await target.post("/v1/rollout/init", ones(4 * MIB), key=False), 401)


@attack("16 MiB of wrong messages to /v1/rollouts, no key")
async def _(target: Target) -> str:
    return refused(await target.post("/v1/rollouts", ones(16 * MIB - 100), key=False), 401)


@attack("1,000,000 unknown keys to /v1/rollouts, no key")
async def _(target: Target) -> str:
    content = json.dumps({f"k{number}": number for number in range(1_000_000)}).encode()
    return refused(await target.post("/v1/rollouts", content, key=False), 401)


@attack("4 MiB of wrong messages to /v1/rollout/init, with a key")
async def _(target: Target) -> str:
    return refused(await target.post("/v1/rollout/init", ones(4 * MIB)), 422)


@attack("16 MiB of wrong messages to each path, with a key")
async def _(target: Target) -> str:
    return said([await target.post(path, ones(16 * MIB - 100)) for path in PATHS])


@attack("10,000 messages with four faults each, with a key")
async def _(target: Target) -> str:
    wrong = {"role": 1, "content": 1, "tool_calls": 1, "tool_call_id": 1}
    return refused(await target.post("/rollout", json.dumps({**EXAMPLE, "messages": [wrong] * 10_000}).encode()), 422)


@attack("900,000 wrong parts in a message's content, with a key")
async def _(target: Target) -> str:
    message = {"role": "user", "content": [1] * 900_000}
    return refused(await target.post("/rollout", json.dumps({**EXAMPLE, "messages": [message]}).encode()), 422)


@attack("800,000 unknown keys to /v1/rollouts, with a key")
async def _(target: Target) -> str:
    content = json.dumps({**PLAIN, **{f"k{number}": number for number in range(800_000)}}).encode()
    return refused(await target.post("/v1/rollouts", content), 422)


@attack("1,000,000 brackets within each other, with a key")
async def _(target: Target) -> str:
    return refused(await target.post("/v1/rollouts", b"[" * 1_000_000), 422)


@attack("a number of 3,000,000 digits, with a key")
async def _(target: Target) -> str:
    content = json.dumps({**INIT_EXAMPLE, "max_turns": "HERE"}).replace('"HERE"', "9" * 3_000_000)
    return said([await target.post("/v1/rollout/init", content.encode())])


@attack("80,000 objects as metadata, with a key")
async def _(target: Target) -> str:
    body = {**PLAIN, "metadata": {"list": [{"a": 1}] * 80_000}}
    return said([await target.post("/v1/rollouts", json.dumps(body).encode())])


@attack("10,000 good messages of 1,500 bytes, with a key")
async def _(target: Target) -> str:
    body = {**PLAIN, "messages": [{"role": "user", "content": "Hello, world. " * 100}] * 10_000}
    return said([await target.post("/v1/rollouts", json.dumps(body).encode())])


@attack("60 bodies of 15 MiB at once, with a key")
async def _(target: Target) -> str:
    content = json.dumps({**PLAIN, "on_drift": "x" * 15 * MIB}).encode()
    return said(await asyncio.gather(*(target.post("/v1/rollouts", content) for _ in range(60))))


@attack("a body of 17 MiB, with a key")
async def _(target: Target) -> str:
    return refused(await target.post("/v1/rollouts", ones(17 * MIB)), 413)


@attack("200 clients that hang up in their body")
async def _(target: Target) -> str:
    head = "POST {} HTTP/1.1\r\nhost: a\r\nauthorization: {}\r\ncontent-length: 100000\r\n\r\n{{"
    for number in range(200):
        _, writer = await asyncio.open_connection("127.0.0.1", target.serving.http_port)
        writer.write(head.format(PATHS[number % 5], target.headers["authorization"]).encode() + b"x" * 50_000)
        await writer.drain()
        writer.close()
    assert await target.healthy()
    return f"{len(target.faults())} errors in the log"


@attack("2,000 wrong keys, 100 at a time")
async def _(target: Target) -> str:
    async def client(numbers: range) -> list[bytes]:
        lines = (
            "POST /v1/rollouts HTTP/1.1",
            "host: a",
            "connection: close",
            "content-length: 2",
            "authorization: wrong-{}",
        )
        head = "\r\n".join((*lines, "", "{{}}"))
        return [(await raw(target.serving.http_port, head.format(number).encode()))[9:12] for number in numbers]

    found = await asyncio.gather(*(client(range(first, first + 20)) for first in range(0, 2_000, 20)))
    logged = sum("refused the API key" in line for line in target.serving.log)
    return f"{Counter(status for each in found for status in each)}; {logged} lines in the log"


HEADS = {
    "no Host": b"GET /healthz HTTP/1.1\r\n\r\n",
    "two Hosts": b"GET /healthz HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    "two keys": b"GET /v1/rollouts HTTP/1.1\r\nhost: a\r\nauthorization: a\r\nauthorization: b\r\n\r\n",
    "HTTP/0.9": b"GET /healthz\r\n\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "two lengths": b"POST /rollout HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{",
    "length and chunks": b"POST /rollout HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n{",
}


async def raw(port: int, content: bytes) -> bytes:
    """Send bytes on a new connection and return all bytes received until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(content)
        return await asyncio.wait_for(reader.read(), 10)
    except (TimeoutError, ConnectionError):
        return b""
    finally:
        writer.close()


@attack("heads that a proxy may read in another way")
async def _(target: Target) -> str:
    found = {name: (await raw(target.serving.http_port, head)).partition(b"\r\n")[0] for name, head in HEADS.items()}
    assert all(line.startswith(b"HTTP/1.1 400 ") for line in found.values()), found
    return f"400 x {len(found)}"

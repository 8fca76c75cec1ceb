"""Attacks by trainers: responses that are expensive to process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from tests.hostile.attacks import attack
from tests.hostile.attacks.http import PLAIN
from tests.hostile.target import Target

_OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_END = '{"role":"assistant","content":"Done."}'


@asynccontextmanager
async def trainer(answer: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[str]:
    """A trainer that reads each request and then responds in any way; yields its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
            )
            await reader.readexactly(length)
            await answer(writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the server closed the connection
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def outcome(target: Target, url: str) -> str:
    """Run a rollout with this trainer and describe how it ended."""
    asked = {
        "messages": PLAIN["messages"],
        "completions": {"url": url, "dialect": "openai", "model": "m"},
        "limits": {"turns": 2, "seconds": 60},
    }
    started = (await target.post("/v1/rollouts", json.dumps(asked).encode())).json()
    assert "rollout" in started, started
    path = f"/v1/rollouts/{started['rollout']['uid']}"
    reply = await target.client.get(path, params={"wait": "120"}, headers=target.headers)
    return str(reply.json().get("outcome"))[:160]


def completion(message: str) -> bytes:
    """A chat completion with one choice."""
    return (
        b'{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":%s,"finish_reason":"stop"}]}'
        % (message.encode())
    )


async def told(target: Target, content: bytes) -> str:
    """How a rollout ends if its trainer sends the same response each time."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(_OK % len(content) + content)

    async with trainer(answer) as url:
        return await outcome(target, url)


def calls(count: int) -> bytes:
    """A completion with this many tool calls."""
    function = {"name": "add", "arguments": '{"a":1,"b":2}'}
    made = [{"id": f"c{number}", "type": "function", "function": function} for number in range(count)]
    return completion(json.dumps({"role": "assistant", "content": None, "tool_calls": made}))


@attack("a trainer's answer with 50,000 tool calls")
async def _(target: Target) -> str:
    return await told(target, calls(50_000))


@attack("a trainer's answer with 400,000 tool calls")
async def _(target: Target) -> str:
    return await told(target, calls(400_000))


@attack("a trainer's answer of 60 MB of tiny values")
async def _(target: Target) -> str:
    return await told(target, b'{"tiny":[' + b"1," * 30_000_000 + b"1]," + completion(_END)[1:])


@attack("a trainer's answer with a number of 3,000,000 digits")
async def _(target: Target) -> str:
    return await told(target, b'{"number":' + b"9" * 3_000_000 + b"," + completion(_END)[1:])


@attack("a trainer that sends 103 responses without end")
async def _(target: Target) -> str:
    async def answer(writer: asyncio.StreamWriter) -> None:
        for _ in range(500_000):
            writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n")
            await writer.drain()

    async with trainer(answer) as url:
        return await outcome(target, url)

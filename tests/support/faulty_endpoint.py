"""An HTTP endpoint that generates for several rollouts, as a trainer or as an engine, and misbehaves in chosen ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Misbehave = Callable[[web.Request], Awaitable[web.StreamResponse]]
TOO_LONG = {"error": {"message": "This model's maximum context length is 16 tokens.", "code": 400}}


@dataclass
class FaultyEndpoint:
    """Completes the conversation whose first message is "member N" with two tokens per message.

    Its responses have the token ids both where trainers and where engines report them.

    Args:
        faults: by first message, how the second completion of a conversation fails.
    """

    faults: Mapping[str, Misbehave] = field(default_factory=dict)
    url: str = ""
    hanging: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        messages: Sequence[dict[str, Any]] = json.loads(await request.text())["messages"]
        member, turn = messages[0]["content"], 1 + sum(each["role"] == "assistant" for each in messages)
        if turn > 1 and member in self.faults:
            return await self.faults[member](request)
        return web.json_response(completion({"content": f"turn {turn}"}, len(messages)))

    async def hang(self, request: web.Request) -> web.StreamResponse:
        """Never respond. `hanging` is set once a request waits."""
        self.hanging.set()
        await asyncio.Event().wait()
        return web.Response()


def ids_of(index: int) -> list[int]:
    """The ids of the message at an index, whoever writes it."""
    return [10 + index, 50 + index]


def completion(message: Mapping[str, Any], messages: int) -> dict[str, Any]:
    """A completion after so many messages."""
    ids = {
        "token_ids": ids_of(messages),
        "prompt_token_ids": [id_ for index in range(messages) for id_ in ids_of(index)],
    }
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop", **ids}
    return {"choices": [choice], "logprobs": [-0.5, -0.25], **ids}


def status(code: int, body: Mapping[str, Any] | None = None) -> Misbehave:
    async def respond(request: web.Request) -> web.StreamResponse:
        return web.json_response(body or {"detail": "no"}, status=code)

    return respond


def text(body: str) -> Misbehave:
    async def respond(request: web.Request) -> web.StreamResponse:
        return web.Response(text=body, content_type="application/json")

    return respond


async def close(request: web.Request) -> web.StreamResponse:
    """Close the connection without a response."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def break_off(request: web.Request) -> web.StreamResponse:
    """Close the connection in the middle of the response."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    assert request.transport is not None
    request.transport.close()
    return response


def call_many(calls: int) -> Misbehave:
    """Respond with a completion that has so many tool calls."""

    async def respond(request: web.Request) -> web.StreamResponse:
        messages = len(json.loads(await request.text())["messages"])
        call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
        listed = [{"id": str(number), **call} for number in range(calls)]
        return web.json_response(completion({"content": None, "tool_calls": listed}, messages))

    return respond


@asynccontextmanager
async def serve(endpoint: FaultyEndpoint) -> AsyncIterator[FaultyEndpoint]:
    """Serve the endpoint on a free port."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", endpoint.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        endpoint.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield endpoint
    finally:
        await runner.cleanup()

"""A proxy between a client and the model endpoint that records what both send."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientSession, ClientTimeout, web

_HOP = {"host", "connection", "transfer-encoding", "content-length", "keep-alive"}


@dataclass
class Exchange:
    """One request, and the response to it as far as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    status: int = 0
    response: bytes = b""


@dataclass
class Recorder:
    """A proxy for `target`. `exchanges` has what passed it, in the order of the requests."""

    target: str
    url: str = ""
    exchanges: list[Exchange] = field(default_factory=list)

    async def forward(self, request: web.Request) -> web.StreamResponse:
        sent = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items() if name.lower() not in _HOP}
        exchange = Exchange(request.method, request.path_qs, headers, json.loads(sent) if sent else None)
        self.exchanges.append(exchange)
        async with (
            ClientSession(auto_decompress=False, timeout=ClientTimeout(total=None)) as session,
            session.request(request.method, self.target + request.path_qs, headers=headers, data=sent) as found,
        ):
            exchange.status = found.status
            kept = {name: value for name, value in found.headers.items() if name.lower() not in _HOP}
            response = web.StreamResponse(status=found.status, headers=kept)
            await response.prepare(request)
            async for chunk in found.content.iter_any():
                exchange.response += chunk
                await response.write(chunk)
            await response.write_eof()
            return response

    @property
    def calls(self) -> list[Exchange]:
        """The requests for completions."""
        ends = ("/chat/completions", "/responses", "/messages")
        return [each for each in self.exchanges if each.method == "POST" and each.path.split("?")[0].endswith(ends)]


@asynccontextmanager
async def recording(target: str) -> AsyncIterator[Recorder]:
    """Run a recorder on a free port."""
    recorder = Recorder(target)
    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", recorder.forward)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    recorder.url = f"http://{host}:{port}"
    try:
        yield recorder
    finally:
        await runner.cleanup()

"""The proxy of `rollout view URL`: it reads below `/v1/` of the named gateway, and nothing else."""

from __future__ import annotations

from contextlib import AsyncExitStack

import httpx
import pytest
from rollout_server.archive.remote import connect, remote_app
from rollout_server.archive.server import listening
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route


@pytest.mark.parametrize(
    ("path", "reached"),
    [
        ("v1/rollouts?label=a%3D1&label=b%3D2", "/base/v1/rollouts?label=a%3D1&label=b%3D2"),
        ("v1/groups/a%20b%C3%A9", "/base/v1/groups/a%20b%C3%A9"),
        ("v1/rollouts%3Fx=1%23y", "/base/v1/rollouts%3Fx%3D1%23y"),
        ("v1/%2e%2e/metrics", ""),
        ("v1/..%2f..%2fother", ""),
        ("v1/rollouts/%2e/x", ""),
    ],
)
async def test_only_paths_below_v1_are_read(path: str, reached: str) -> None:
    seen: list[str] = []

    async def echo(request: Request) -> Response:
        query = request.url.query
        seen.append(request.scope["raw_path"].decode() + (f"?{query}" if query else ""))
        return PlainTextResponse("")

    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(listening(Starlette(routes=[Route("/{path:path}", echo)]), 0))
        client = await stack.enter_async_context(connect(f"{server}base", ""))
        url = await stack.enter_async_context(listening(remote_app(client), 0))
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        reply = await http.get(f"{url}{path}")
    assert (reply.status_code, seen) == ((200, [reached]) if reached else (404, []))

"""The page over a running server, read-only: its own files, and a proxy for what it reads of the server's gateway."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Final
from urllib.parse import quote, urlsplit

import httpx
from fastapi import FastAPI
from rollout_gateway.page.routes import add_pages
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from rollout_server.archive.archive import Unreadable
from rollout_server.archive.service import READ_ONLY

_PASSED: Final = ("accept", "authorization", "last-event-id", "grpc-timeout")
_RETURNED: Final = ("content-type", "cache-control", "retry-after", "x-request-id")
_SECONDS: Final = 30.0


def connect(url: str, key: str) -> httpx.AsyncClient:
    """Return a client of the gateway at a URL, of which the fragment is ignored. Raises ValueError for other URLs."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not the URL of a gateway, such as http://localhost:9000")
    if parts.username or parts.password:
        raise ValueError("the URL must not contain a user or password; set ROLLOUT_API_KEY to your API key")
    base = parts._replace(query="", fragment="", path=parts.path.rstrip("/") + "/").geturl()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    # Events of a running rollout may be far apart; the gateway sends a comment every 15 s.
    return httpx.AsyncClient(base_url=base, headers=headers, timeout=httpx.Timeout(_SECONDS, read=2 * _SECONDS))


async def check(client: httpx.AsyncClient) -> None:
    """Raise `Unreadable` unless a gateway answers."""
    try:
        found = await client.get("v1/server")
        if found.status_code == httpx.codes.UNAUTHORIZED:
            return  # the page asks for the key
        features = found.json()["features"] if found.is_success else None
    except httpx.HTTPError as error:
        raise Unreadable(f"{client.base_url} cannot be reached: {error or type(error).__name__}") from None
    except (ValueError, KeyError, TypeError):
        features = None
    if features is None:
        text = f"GET v1/server returned {found.status_code}"
        raise Unreadable(f"{client.base_url} is not the gateway of a rollout server, or an older one ({text})")


def remote_app(client: httpx.AsyncClient) -> FastAPI:
    """Return an application with the page, which passes GET requests below `/v1/` on to the client's gateway, and no others."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    add_pages(app)

    @app.get("/v1/{path:path}")
    async def read(path: str, request: Request) -> Response:
        headers = {name: value for name, value in request.headers.items() if name in _PASSED}
        if {".", ".."} & {*path.split("/")}:  # it is decoded here, so it has every form of them
            return JSONResponse({"error": {"code": "NOT_FOUND", "message": "there is no such path"}}, 404)
        passed = client.build_request("GET", f"v1/{quote(path)}", params=request.url.query, headers=headers)
        try:
            found = await client.send(passed, stream=True)
        except httpx.HTTPError as error:
            text = f"{client.base_url} cannot be reached: {error or type(error).__name__}"
            return JSONResponse({"error": {"code": "UNAVAILABLE", "message": text}}, 502)
        returned = {name: found.headers[name] for name in _RETURNED if name in found.headers}
        if path == "server" and found.is_success:
            return Response(_read_only(await found.aread()), headers=returned)
        return StreamingResponse(_content(found), found.status_code, returned)

    return app


async def _content(response: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in response.aiter_bytes():
            yield piece
    finally:
        await response.aclose()


def _read_only(content: bytes) -> bytes:
    """Add the feature `READ_ONLY` to what a server says of itself."""
    server = json.loads(content)
    return json.dumps({**server, "features": [*server["features"], READ_ONLY]}).encode()

"""The HTTP port of a tool server: MCP over streamable HTTP at `/mcp`, with and without sessions, and `/health`."""

from __future__ import annotations

import asyncio

from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from rollout_server.core.error import Unauthenticated
from rollout_server.edge.api_keys import Keyring, WrongKeys
from rollout_server.edge.targets.host_port import url_host

PATH = "/mcp"


class McpHttpApp:
    """The ASGI application. It checks keys and passes requests to the session manager."""

    def __init__(self, manager: StreamableHTTPSessionManager, keys: Keyring) -> None:
        self._manager = manager
        self._keys = keys
        self._wrong_keys = WrongKeys()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["path"] == "/health":
            await PlainTextResponse("ok\n")(scope, receive, send)
        elif scope["path"] != PATH:
            await _error(404, f"MCP is at {PATH}")(scope, receive, send)
        elif (refused := await self._refusal(Request(scope))) is not None:
            await refused(scope, receive, send)
        else:
            await self._manager.handle_request(scope, receive, send)

    async def _refusal(self, request: Request) -> Response | None:
        """Return the response to a request without a valid key; None for all others."""
        header = request.headers.get("authorization")
        try:
            self._keys.caller(header)
        except Unauthenticated as error:
            peer = request.client.host if request.client is not None else "an unknown address"
            await asyncio.sleep(self._wrong_keys.record(header, peer))
            response = _error(401, error.message)
            response.headers["www-authenticate"] = "Bearer"
            return response
        return None


def transport_security(host: str, *, loopback: bool) -> TransportSecuritySettings:
    """Return the check of the headers Host and Origin.

    A server for this machine only needs no key, so it refuses requests that a web page made a browser send. Other servers need a
    key, which no browser adds by itself.
    """
    if not loopback:
        return TransportSecuritySettings(enable_dns_rebinding_protection=False)
    names = {"127.0.0.1", "localhost", "[::1]", url_host(host)}
    return TransportSecuritySettings(
        allowed_hosts=[form for name in names for form in (name, f"{name}:*")],
        allowed_origins=[form for name in names for form in (f"http://{name}", f"http://{name}:*")],
    )


def _error(status: int, text: str) -> JSONResponse:
    return JSONResponse({"error": text}, status)

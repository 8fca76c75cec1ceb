"""A uvicorn server in the running event loop whose endpoints can break their connections on purpose."""

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

BACKLOG: Final = 4096
KEEP_ALIVE: Final = 3600
"""Seconds. A short time would cause random resets: the server could close an idle connection just as a client reuses it."""
_LOOK: Final = 0.001


class _OpenProtocol(H11Protocol):
    """Passes its transport to the application as ``scope["state"]["transport"]``; see `broken_responses`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "transport": transport}


class _SignallessServer(uvicorn.Server):
    """Waits for events instead of polling ten times per second, and installs no signal handlers."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self.closing = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.lifespan.state["closing"] = self.closing
        await super().startup(sockets=sockets)
        self.ready.set()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.closing.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down like uvicorn's method, which polls only ten times per second."""
        for server in self.servers:
            server.close()
        for bound in sockets or ():
            bound.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(_LOOK)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpServer:
    """An HTTP server on its own socket, from `open` to `close`."""

    def __init__(self, server: _SignallessServer, serving: "asyncio.Task[None]", port: int) -> None:
        self._server = server
        self._serving = serving
        self.port = port

    @classmethod
    async def open(cls, app: ASGIApp, host: str, port: int) -> "HttpServer":
        """Bind and start serving; `port` 0 selects any free one. Raises OSError if the address cannot be bound."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.create_server((host, port), family=family, backlog=BACKLOG)
        # Accepted connections inherit this. Nagle's algorithm would delay each response by 40 ms. asyncio sets the option only for
        # sockets that were created with IPPROTO_TCP, which create_server does not do.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        config = uvicorn.Config(app, http=_OpenProtocol, ws="none", lifespan="off", log_config=None)
        config.access_log = config.date_header = config.server_header = False
        config.timeout_keep_alive = KEEP_ALIVE
        server = _SignallessServer(config)
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        ready = asyncio.create_task(server.ready.wait())
        await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            ready.cancel()
            bound.close()
            await serving
        return cls(server, serving, bound.getsockname()[1])

    async def close(self) -> None:
        """Stop serving. Delayed responses are dropped and their connections aborted."""
        self._server.closing.set()
        await self._serving

"""An HTTP listener for the running event loop: uvicorn with TLS, limits, and an end that somebody else decides."""

import asyncio
import contextlib
import functools
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from rollout_gateway.http.protocol import ConnectionLimits, HttpProtocol
from rollout_gateway.http.tls import Certificates, TlsFiles

_BACKLOG: Final = 4096
_HANDSHAKE_SECONDS: Final = 20.0
_CANCEL_SECONDS: Final = 5.0
_DATE_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.01


@dataclass(frozen=True, slots=True)
class Listening:
    """Where and how to listen. Port 0: any. Times in seconds."""

    host: str = "127.0.0.1"
    port: int = 9000
    tls: TlsFiles | None = None
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    #: How often the files of `tls` are looked at.
    reload_seconds: float = 1.0
    #: How long requests under way may go on once the listener is stopped.
    grace_seconds: float = 5.0


class HttpListener:
    """Serves an application from `start` to `stop`. Raises ValueError where `tls` names files that cannot be used."""

    def __init__(self, app: ASGIApp, listening: Listening) -> None:
        self._listening = listening
        self._certificates = Certificates(listening.tls) if listening.tls is not None else None
        self._server = _Server(app, listening, self._certificates)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> int:
        """Listens and returns the port. Raises OSError where it cannot be had."""
        listener = _bound(self._listening.host, self._listening.port)
        port: int = listener.getsockname()[1]
        serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="http")
        ready = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            ready.cancel()
            listener.close()
            serving.result()
            raise RuntimeError("the HTTP server did not start")
        self._tasks = [serving]
        if self._certificates is not None:
            watching = self._certificates.watch(self._listening.reload_seconds)
            self._tasks.append(asyncio.create_task(watching, name="certificates"))
        return port

    async def stop(self) -> None:
        """Takes no more connections, answers what is under way within the grace time, and cancels the rest."""
        if not self._tasks:
            return
        serving, *others = self._tasks
        self._tasks = []
        self._server.leave()
        await asyncio.shield(serving)
        for task in others:
            task.cancel()
        await self._server.cancel_requests()

    def hurry(self) -> None:
        """Ends `stop`, also one that waits already, without grace."""
        self._server.force_exit = True


class _Server(uvicorn.Server):
    """Without signal handlers of its own, on a socket that is there already, with our protocol."""

    def __init__(self, app: ASGIApp, listening: Listening, certificates: Certificates | None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=HttpProtocol,
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=listening.limits.idle_seconds,
            )
        )
        self.ready = asyncio.Event()
        self._leaving = asyncio.Event()
        self._grace_seconds = listening.grace_seconds
        self._limits = listening.limits
        self._tls = certificates.context if certificates is not None else None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens on the sockets."""
        make = functools.partial(
            HttpProtocol,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            limits=self._limits,
            stopping=lambda: self.should_exit,
        )
        loop = asyncio.get_running_loop()
        handshake = _HANDSHAKE_SECONDS if self._tls is not None else None
        self.servers = [
            await loop.create_server(make, sock=each, ssl=self._tls, backlog=_BACKLOG, ssl_handshake_timeout=handshake)
            for each in sockets or []
        ]
        self.started = True
        self.ready.set()

    async def main_loop(self) -> None:
        """Renews the date that answers carry, until it is to leave."""
        while not self._leaving.is_set():
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), _DATE_SECONDS)

    def leave(self) -> None:
        """Ends `serve`, which lets requests under way go on for the grace time."""
        self.should_exit = True
        self._leaving.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes no more connections, closes those on which nothing is asked, and waits for the others."""
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace_seconds):
                while (state.connections or state.tasks) and not self.force_exit:  # noqa: ASYNC110 - uvicorn tells nobody
                    await asyncio.sleep(_LOOK_SECONDS)

    async def cancel_requests(self) -> None:
        """Ends the requests that are left, so that their calls are over before anybody closes a channel."""
        left = set(self.server_state.tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_CANCEL_SECONDS)


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named: asyncio sends at once, without Nagle's wait for the last acknowledgement, only where it sees TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _notice_the_dead(listener)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def _notice_the_dead(listener: socket.socket) -> None:
    """Connections inherit this: a client that vanished without a word counts as one that hung up after a minute."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

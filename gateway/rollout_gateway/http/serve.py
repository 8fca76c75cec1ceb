"""An HTTP listener for the running event loop: uvicorn with TLS, limits, and an end that somebody else decides."""

import asyncio
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import uvicorn
from starlette.types import ASGIApp

from rollout_gateway.certificate_files import KeyPair, Reloaded, load_authorities, load_pair
from rollout_gateway.http.protocol import ConnectionLimits, HttpProtocol

_BACKLOG: Final = 4096
_CANCEL_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.01


@dataclass(frozen=True, slots=True)
class Listening:
    """Where and how to listen. Port 0: any. Times in seconds."""

    host: str = "127.0.0.1"
    port: int = 9000
    tls: KeyPair | None = None
    #: With TLS: only clients with a certificate of this authority are served.
    client_ca: Path | None = None
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    #: How long requests under way may go on once the listener is stopped.
    grace_seconds: float = 5.0


class HttpListener:
    """Serves an application from `start` to `stop`. Raises ValueError where `tls` names files that cannot be used."""

    def __init__(self, app: ASGIApp, listening: Listening) -> None:
        self._listening = listening
        self._server: uvicorn.Server
        protocol = partial(HttpProtocol, limits=listening.limits, stopping=lambda: self._server.should_exit)
        config = uvicorn.Config(
            app,
            http=cast(Any, protocol),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=listening.limits.idle_seconds,
        )
        config.load()
        config.ssl = listening.tls and server_context(listening.tls, listening.client_ca)
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._ticking: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listens and returns the port. Raises OSError where it cannot be had."""
        listener = _bound(self._listening.host, self._listening.port)
        port: int = listener.getsockname()[1]
        await self._server.startup([listener])
        # Renews the date that answers carry.
        self._ticking = asyncio.create_task(self._server.main_loop(), name="http")
        return port

    async def stop(self) -> None:
        """Takes no more connections, answers what is under way within the grace time, and cancels the rest."""
        if self._ticking is None:
            return
        self._ticking.cancel()
        self._ticking = None
        self._server.should_exit = True
        state = self._server.server_state
        for server in self._server.servers:
            server.close()
        for connection in list(state.connections):
            connection.shutdown()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._listening.grace_seconds):
                # uvicorn tells nobody when they are over
                while (state.connections or state.tasks) and not self._server.force_exit:  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_SECONDS)
        # Their calls are over before anybody closes a channel.
        left = set(state.tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_CANCEL_SECONDS)

    def hurry(self) -> None:
        """Ends `stop`, also one that waits already, without grace."""
        self._server.force_exit = True


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    # Connections inherit these. Sent at once, without Nagle's wait for the last acknowledgement; and a client that vanished
    # without a word counts as one that hung up after a minute.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return listener


def server_context(pair: KeyPair, client_ca: Path | None = None) -> ssl.SSLContext:
    """The context of a listener, which follows its files. Raises ValueError, naming the file, where it cannot be made.

    A handshake looks up, at its beginning, the context that is then in force; so what is replaced is replaced at once and
    whole, and connections that are open go on with what they began with.
    """
    current = Reloaded((*pair, client_ca), partial(_loaded, pair, client_ca), f"the certificate in {pair.cert}")

    def choose(connection: ssl.SSLSocket | ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        connection.context = current.look()

    context = current.value
    # Called for every handshake, also for those that name no server.
    context.sni_callback = choose
    return context


def _loaded(pair: KeyPair, client_ca: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    # Renegotiation costs the server far more than the client that asks for it.
    context.options |= ssl.OP_NO_RENEGOTIATION
    load_pair(context, pair)
    if client_ca is not None:
        load_authorities(context, client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
        # Who resumes a connection is not asked for a certificate again, so an authority that is no longer trusted would be for
        # two hours. TLS 1.2 resumes even so, from a cache of OpenSSL's that Python cannot turn off.
        context.num_tickets = 0
    return context

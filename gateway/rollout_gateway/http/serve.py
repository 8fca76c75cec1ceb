"""HTTP listener for the running event loop: uvicorn with TLS and limits. The caller starts and stops it."""

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
    """Where and how to listen. Port 0 means any free port."""

    host: str = "127.0.0.1"
    port: int = 9000
    tls: KeyPair | None = None
    #: With TLS: require client certificates that this authority signed.
    client_ca: Path | None = None
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    #: How long running requests may continue after `stop`.
    grace_seconds: float = 5.0
    #: Share the port with other processes of this user (SO_REUSEPORT).
    shares_port: bool = False


class HttpListener:
    """Serves an application from `start` to `stop`. Raises ValueError if the files in `tls` cannot be used."""

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
        """Start to listen and return the port. Raises OSError if the address is not available."""
        listener = _bound(self._listening)
        port: int = listener.getsockname()[1]
        await self._server.startup([listener])
        # Updates the Date header of responses once per second.
        self._ticking = asyncio.create_task(self._server.main_loop(), name="http")
        return port

    async def stop(self) -> None:
        """Stop accepting connections, let running requests finish within the grace time, then cancel the others."""
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
                # uvicorn has no event for their end
                while (state.connections or state.tasks) and not self._server.force_exit:  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_SECONDS)
        # Wait until their gRPC calls have ended, because the caller closes the channels next.
        left = set(state.tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_CANCEL_SECONDS)

    def hurry(self) -> None:
        """Skip the grace time, also in a `stop` that is already waiting."""
        self._server.force_exit = True


def _bound(listening: Listening) -> socket.socket:
    host, port = listening.host, listening.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        listener = socket.create_server(
            (host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both, reuse_port=listening.shares_port
        )
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    # Accepted connections inherit these options. TCP_NODELAY sends small writes at once, without Nagle's wait for an ACK.
    # Keep-alive probes detect within a minute a client that vanished without closing its connection.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return listener


def server_context(pair: KeyPair, client_ca: Path | None = None) -> ssl.SSLContext:
    """Return the TLS context of a listener. It reloads changed files. Raises ValueError that names an unusable file.

    Each handshake looks up the current context at its start. So a new certificate and key apply together and at once, and
    open connections keep what they began with.
    """
    current = Reloaded((*pair, client_ca), partial(_loaded, pair, client_ca), f"the certificate in {pair.cert}")

    def choose(connection: ssl.SSLSocket | ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        connection.context = current.look()

    context = current.value
    # OpenSSL calls this for every handshake, also without a server name.
    context.sni_callback = choose
    return context


def _loaded(pair: KeyPair, client_ca: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    # Renegotiation costs the server far more than the client that requests it.
    context.options |= ssl.OP_NO_RENEGOTIATION
    load_pair(context, pair)
    if client_ca is not None:
        load_authorities(context, client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
        # A resumed session sends no client certificate, so a removed authority would stay trusted for two hours. Without
        # tickets TLS 1.3 does not resume. TLS 1.2 still does, from an OpenSSL cache that Python cannot turn off.
        context.num_tickets = 0
    return context

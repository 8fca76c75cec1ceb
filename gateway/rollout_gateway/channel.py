"""Channels to rollout servers: addresses, TLS, and client certificates that are replaced while calls run.

gRPC reads certificates once, when a channel is made. Here a channel whose files have changed is replaced for the calls that
come after; those under way end on the one they began on, which is closed after the last of them.
"""

import asyncio
import logging
import re
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import grpc

from rollout_gateway.pem_files import KeyPair, Watch, load_authorities, load_pair, read

_LOG = logging.getLogger(__name__)
_CERTIFICATE: Final = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A proxy for web pages is no way to a rollout server.
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Also between calls: a connection that was forgotten on the way would cost the next call half a minute.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A server that is back is found soon (gRPC waits up to two minutes), and one that does not answer is given up soon.
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),
)


@dataclass(frozen=True, slots=True)
class ChannelTls:
    """TLS towards rollout servers. Without `ca` the system's authorities are trusted."""

    ca: Path | None = None
    #: The client certificate, for servers that demand one.
    pair: KeyPair | None = None
    #: The name that the server's certificate has to be for, where it is not the one in the address.
    server_name: str = ""
    #: How often the files are looked at, by calls.
    reload_seconds: float = 1.0

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files."""
        return (*([self.ca] if self.ca else []), *([self.pair.cert, self.pair.key] if self.pair else []))


class ServerChannel(grpc.aio.Channel):
    """A channel to one server, which knows its address."""

    def __init__(self, address: str, make: Callable[[], grpc.aio.Channel], tls: ChannelTls | None = None) -> None:
        self.address = address
        self._make = make
        self._watch = Watch(tls.paths) if tls is not None and tls.paths else None
        self._look_seconds = tls.reload_seconds if tls is not None else 0.0
        self._looked = time.monotonic()
        self._current = _Generation(make())
        self._retired: dict[asyncio.Task[None], _Generation] = {}

    # The signatures are grpc's, whose generics need names of its own; stubs pass `_registered_method` too.

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What calls an rpc with one answer."""
        return self._multicallable("unary_unary", method, args, kwargs)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What calls an rpc that answers with a stream."""
        return self._multicallable("unary_stream", method, args, kwargs)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What calls an rpc that takes a stream."""
        return self._multicallable("stream_unary", method, args, kwargs)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What calls an rpc of two streams."""
        return self._multicallable("stream_stream", method, args, kwargs)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Whether the server is connected."""
        return self._current.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Waits until the state is another one."""
        await self._current.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Waits until the server is connected."""
        await self._current.channel.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        """Closes it; calls may go on for `grace` seconds."""
        generations = (self._current, *self._retired.values())
        await asyncio.gather(*(each.channel.close(grace) for each in generations))

    async def __aenter__(self) -> Self:
        """Nothing: it is open."""
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        """Closes it."""
        await self.close()

    def _multicallable(self, kind: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._watch is None:
            return getattr(self._current.channel, kind)(method, *args, **kwargs)
        watch, make = self._watch, partial(_multicallable, kind, method, args, kwargs)

        def call(*given: Any, **options: Any) -> Any:
            self._look(watch)
            return self._current.call(method, make, *given, **options)

        return call

    def _look(self, watch: Watch) -> None:
        now = time.monotonic()
        if now < self._looked + self._look_seconds:
            return
        self._looked = now
        if not watch.changed():
            return
        try:
            following = _Generation(self._make())
        except ValueError as error:
            _LOG.error("the certificate towards %s is kept: %s", self.address, error)
            return
        _LOG.info("the certificate towards %s was replaced", self.address)
        self._retire(self._current)
        self._current = following

    def _retire(self, generation: "_Generation") -> None:
        closing = asyncio.ensure_future(generation.close_when_idle())
        self._retired[closing] = generation
        closing.add_done_callback(self._retired.pop)


class _Generation:
    """A channel of gRPC's, and how many calls are under way on it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._methods: dict[str, Any] = {}
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def call(self, method: str, make: Callable[[grpc.aio.Channel], Any], *given: Any, **options: Any) -> Any:
        """Begins a call."""
        if method not in self._methods:
            self._methods[method] = make(self.channel)
        call = self._methods[method](*given, **options)
        self._calls += 1
        self._idle.clear()
        call.add_done_callback(self._ended)
        return call

    async def close_when_idle(self) -> None:
        """Waits for the calls under way, then closes the channel."""
        await self._idle.wait()
        await self.channel.close()

    def _ended(self, _: object) -> None:
        self._calls -= 1
        if not self._calls:
            self._idle.set()


def _multicallable(
    kind: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], channel: grpc.aio.Channel
) -> Any:
    return getattr(channel, kind)(method, *args, **kwargs)


def open_channel(address: str, tls: ChannelTls | None = None) -> ServerChannel:
    """A channel to the server at `host:port`, `grpc://host:port`, `grpcs://host:port` or `unix:PATH`.

    grpcs is TLS and grpc is none; without a scheme it is TLS where `tls` is given. Connects with the first call. Raises
    ValueError for another address, and for files that cannot be used.
    """
    target, secure = _parsed(address, tls is not None)
    if not secure:
        return ServerChannel(address, partial(grpc.aio.insecure_channel, target, list(_OPTIONS)))
    chosen = tls or ChannelTls()
    return ServerChannel(address, partial(_secure, target, chosen), chosen)


def _secure(target: str, tls: ChannelTls) -> grpc.aio.Channel:
    name = [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name else []
    return grpc.aio.secure_channel(target, _credentials(tls), [*_OPTIONS, *name])


def _parsed(address: str, secure: bool) -> tuple[str, bool]:
    if address.startswith("unix:"):
        return address, False
    scheme, separator, place = address.rpartition("://")
    wrong = ValueError(
        f"{address!r} is no address of a rollout server: HOST:PORT, grpc://..., grpcs://... or unix:PATH"
    )
    if "@" in address:
        raise ValueError(
            "the address of a rollout server holds no user and no password: API keys come with the requests"
        )
    if (separator and scheme not in ("grpc", "grpcs")) or any(letter.isspace() for letter in address):
        raise wrong
    try:
        parts = urlsplit(f"//{place}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise wrong from None
    if not host or not port or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise wrong
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}", scheme == "grpcs" if separator else secure


def _credentials(tls: ChannelTls) -> grpc.ChannelCredentials:
    # gRPC would say nothing about files that do not fit, and fail at every handshake.
    checked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    roots = _system_roots()
    if tls.ca is not None:
        load_authorities(checked, tls.ca)
        roots = read(tls.ca, "the authority's certificates")
    if tls.pair is None:
        return grpc.ssl_channel_credentials(roots)
    load_pair(checked, tls.pair)
    return grpc.ssl_channel_credentials(roots, read(tls.pair.key, "the key"), read(tls.pair.cert, "the certificate"))


def _system_roots() -> bytes | None:
    """What the system trusts; None where it has nothing, and gRPC's own list counts. gRPC does not look here by itself."""
    places = ssl.get_default_verify_paths()
    files = [Path(places.cafile)] if places.cafile else []
    if not files and places.capath:
        files = sorted(path for path in Path(places.capath).iterdir() if path.is_file())
    found = dict.fromkeys(block for path in files for block in _CERTIFICATE.findall(path.read_bytes()))
    return b"\n".join(found) or None

"""Channels to rollout servers: addresses, TLS, and rotation of certificates while calls run.

gRPC reads certificates once, when a channel is created. When the files change, later calls use a new channel. Running calls
finish on the old channel, which closes after the last of them.
"""

import asyncio
import re
import ssl
from collections.abc import Callable, Iterable
from functools import partialmethod
from pathlib import Path
from typing import Any, Final, Self
from weakref import WeakSet

import grpc

from rollout_gateway.certificate_files import KeyPair, Reloaded, load_authorities, load_pair, read

_CERTIFICATE: Final = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_ADDRESS: Final = re.compile(
    r"((?P<scheme>grpcs?)://)?(?P<host>[^\s/?#:\[\]]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})/?"
)
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Ignore http_proxy: rollout servers are internal.
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Keepalive also between calls: a connection that a router dropped silently would delay the next call by half a minute.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Reconnect soon after a server is back (gRPC's default backoff grows to two minutes). Give up a silent attempt after 5 s.
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),
)


class ServerChannel(grpc.aio.Channel):
    """Channel to one server, with its address. When one of `files` changes, `make` creates the channel for later calls."""

    def __init__(self, address: str, make: Callable[[], grpc.aio.Channel], files: Iterable[Path | None] = ()) -> None:
        self.address = address
        self._current = Reloaded(files, make, f"the certificate towards {address}")
        #: Channels with calls. A replaced channel stays here while calls run on it.
        self._called = WeakSet[grpc.aio.Channel]()

    def _multicallable(self, kind: str, method: str, *args: Any, **kwargs: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            channel = self._current.look()
            self._called.add(channel)
            called = getattr(channel, kind)(method, *args, **kwargs)(*given, **options)
            # A channel without references closes itself, so the callback holds one. gRPC drops it when the call has ended.
            called.add_done_callback(lambda _, held=channel: None)
            return called

        return call

    # The signatures are grpc's, whose generics need type variables of its own; stubs pass `_registered_method` too.
    unary_unary = partialmethod(_multicallable, "unary_unary")
    unary_stream = partialmethod(_multicallable, "unary_stream")
    stream_unary = partialmethod(_multicallable, "stream_unary")
    stream_stream = partialmethod(_multicallable, "stream_stream")

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the connectivity of the current channel."""
        return self._current.value.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the state differs from `last_observed_state`."""
        await self._current.value.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until the channel is connected."""
        await self._current.value.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        """Close all channels. Running calls may continue for `grace` seconds."""
        await asyncio.gather(*(each.close(grace) for each in {self._current.value, *self._called}))

    async def __aenter__(self) -> Self:
        """Return the channel, which is already open."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the channel."""
        await self.close()


def open_channel(
    address: str, ca: Path | None = None, pair: KeyPair | None = None, server_name: str = ""
) -> ServerChannel:
    """Return a channel to the server at `host:port`, `grpc://host:port`, `grpcs://host:port` or `unix:PATH`.

    It connects on the first call. grpcs means TLS, grpc means none; without a scheme, any of the other arguments enables TLS.

    Args:
        ca: PEM file of the trusted authorities; the system's if None.
        pair: client certificate, for servers that require one.
        server_name: name in the server's certificate, if it differs from the host of the address.

    Raises:
        ValueError: the address is malformed, or a file cannot be used.
    """
    target, secure = _parsed(address, any((ca, pair, server_name)))
    if not secure:
        return ServerChannel(address, lambda: grpc.aio.insecure_channel(target, _OPTIONS))
    name = (("grpc.ssl_target_name_override", server_name),) if server_name else ()

    def make() -> grpc.aio.Channel:
        return grpc.aio.secure_channel(target, _credentials(ca, pair), (*_OPTIONS, *name))

    return ServerChannel(address, make, (ca, *(pair or ())))


def _parsed(address: str, secure: bool) -> tuple[str, bool]:
    """Return gRPC's target for an address, and whether the connection uses TLS."""
    if address.startswith("unix:"):
        return address, False
    if "@" in address:
        raise ValueError(
            "the address of a rollout server must not contain a user or password: API keys come with the requests"
        )
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 1 << 16:
        raise ValueError(
            f"{address!r} is not an address of a rollout server; use HOST:PORT, grpc://..., grpcs://... or unix:PATH"
        )
    return f"{found['host']}:{found['port']}", found["scheme"] == "grpcs" if found["scheme"] else secure


def _credentials(ca: Path | None, pair: KeyPair | None) -> grpc.ChannelCredentials:
    # Check the files here: gRPC accepts unusable ones without an error and fails at every handshake.
    checked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca is not None:
        load_authorities(checked, ca)
    if pair is not None:
        load_pair(checked, pair)
    roots = read(ca, "the authority's certificates") if ca is not None else _system_roots()
    return grpc.ssl_channel_credentials(roots, *(read(path, "the client's pair") for path in reversed(pair or ())))


def _system_roots() -> bytes | None:
    """Return the system's trusted certificates in PEM, which gRPC does not read itself. None: use gRPC's built-in list."""
    places = ssl.get_default_verify_paths()
    files = [Path(places.cafile)] if places.cafile else sorted(Path(places.capath).iterdir()) if places.capath else []
    texts = (path.read_bytes() for path in files if path.is_file())
    return b"\n".join(dict.fromkeys(block for text in texts for block in _CERTIFICATE.findall(text))) or None

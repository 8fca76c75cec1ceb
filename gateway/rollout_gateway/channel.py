"""Channels to rollout servers: addresses, TLS, and client certificates that are replaced while calls run.

gRPC reads certificates once, when a channel is made. Here a channel whose files have changed is replaced for the calls that
come after; those under way end on the one they began on, which is closed after the last of them.
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


class ServerChannel(grpc.aio.Channel):
    """A channel to one server, which knows its address. `files` are those whose change `make` takes in."""

    def __init__(self, address: str, make: Callable[[], grpc.aio.Channel], files: Iterable[Path | None] = ()) -> None:
        self.address = address
        self._current = Reloaded(files, make, f"the certificate towards {address}")
        #: Those that were called; one that was replaced is in it as long as calls are under way on it.
        self._called = WeakSet[grpc.aio.Channel]()

    def _multicallable(self, kind: str, method: str, *args: Any, **kwargs: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            channel = self._current.look()
            self._called.add(channel)
            called = getattr(channel, kind)(method, *args, **kwargs)(*given, **options)
            # A channel that nobody holds closes itself; gRPC drops the callback, and the channel with it, when the call has ended.
            called.add_done_callback(lambda _, held=channel: None)
            return called

        return call

    # The signatures are grpc's, whose generics need names of its own; stubs pass `_registered_method` too.
    unary_unary = partialmethod(_multicallable, "unary_unary")
    unary_stream = partialmethod(_multicallable, "unary_stream")
    stream_unary = partialmethod(_multicallable, "stream_unary")
    stream_stream = partialmethod(_multicallable, "stream_stream")

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Whether the server is connected."""
        return self._current.value.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Waits until the state is another one."""
        await self._current.value.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Waits until the server is connected."""
        await self._current.value.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        """Closes it; calls may go on for `grace` seconds."""
        await asyncio.gather(*(each.close(grace) for each in {self._current.value, *self._called}))

    async def __aenter__(self) -> Self:
        """Nothing: it is open."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes it."""
        await self.close()


def open_channel(
    address: str, ca: Path | None = None, pair: KeyPair | None = None, server_name: str = ""
) -> ServerChannel:
    """A channel to the server at `host:port`, `grpc://host:port`, `grpcs://host:port` or `unix:PATH`.

    grpcs is TLS and grpc is none; without a scheme it is TLS where something is given for it. Without `ca` the system's authorities
    are trusted; `pair` is for servers that demand a certificate; `server_name` is the name in the server's certificate, where it is
    not the one in the address. Connects with the first call. Raises ValueError for another address, and for files that cannot be
    used.
    """
    target, secure = _parsed(address, any((ca, pair, server_name)))
    if not secure:
        return ServerChannel(address, lambda: grpc.aio.insecure_channel(target, _OPTIONS))
    name = (("grpc.ssl_target_name_override", server_name),) if server_name else ()

    def make() -> grpc.aio.Channel:
        return grpc.aio.secure_channel(target, _credentials(ca, pair), (*_OPTIONS, *name))

    return ServerChannel(address, make, (ca, *(pair or ())))


def _parsed(address: str, secure: bool) -> tuple[str, bool]:
    """What gRPC calls it, and whether TLS is spoken."""
    if address.startswith("unix:"):
        return address, False
    if "@" in address:
        raise ValueError(
            "the address of a rollout server holds no user and no password: API keys come with the requests"
        )
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 1 << 16:
        raise ValueError(
            f"{address!r} is no address of a rollout server: HOST:PORT, grpc://..., grpcs://... or unix:PATH"
        )
    return f"{found['host']}:{found['port']}", found["scheme"] == "grpcs" if found["scheme"] else secure


def _credentials(ca: Path | None, pair: KeyPair | None) -> grpc.ChannelCredentials:
    # gRPC would say nothing about files that do not fit, and fail at every handshake.
    checked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca is not None:
        load_authorities(checked, ca)
    if pair is not None:
        load_pair(checked, pair)
    roots = read(ca, "the authority's certificates") if ca is not None else _system_roots()
    return grpc.ssl_channel_credentials(roots, *(read(path, "the client's pair") for path in reversed(pair or ())))


def _system_roots() -> bytes | None:
    """What the system trusts; None where it has nothing, and gRPC's own list counts. gRPC does not look here by itself."""
    places = ssl.get_default_verify_paths()
    files = [Path(places.cafile)] if places.cafile else sorted(Path(places.capath).iterdir()) if places.capath else []
    texts = (path.read_bytes() for path in files if path.is_file())
    return b"\n".join(dict.fromkeys(block for text in texts for block in _CERTIFICATE.findall(text))) or None

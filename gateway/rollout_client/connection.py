"""Where a server is and how to talk to it: addresses, TLS, channel options, and the metadata of calls."""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import urlsplit

import grpc

from rollout_client.retry import DEFAULT_RETRY, Retry

Pem: TypeAlias = bytes | str | Path
CallMetadata: TypeAlias = Mapping[str, str | bytes]
DEFAULT_TIMEOUT: Final = 60.0
REQUEST_ID: Final = "x-request-id"
AUTHORIZATION: Final = "authorization"

_FORMS: Final = "host:port, grpc://host:port, grpcs://host or unix:/path"
_KEY: Final = re.compile(r"[0-9a-z_.-]+")
# What a header may carry, and arrives as it was sent: spaces at the ends do not.
_VISIBLE: Final = re.compile(r"[!-~](?:[ -~]*[!-~])?")


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS to the server. A text or path is the name of a PEM file, bytes are PEM themselves.

    Args:
        ca: the authorities that are trusted; None: those that gRPC comes with.
        certificate: our own chain, for servers that ask for one.
        key: its private key.
        server_name: the name in the server's certificate, where it is not the address's host.
    """

    ca: Pem | None = None
    certificate: Pem | None = None
    key: Pem | None = field(default=None, repr=False)
    server_name: str = ""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key come together")

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files. Raises OSError for one that cannot be read, ValueError for one that is no PEM."""
        read = {name: _read_pem(getattr(self, name), name) for name in ("ca", "certificate", "key")}
        return grpc.ssl_channel_credentials(read["ca"], read["key"], read["certificate"])


@dataclass(frozen=True, slots=True)
class Settings:
    """What both clients are made with.

    Args:
        address: where the server is; None: at the other end of a channel that its user made.
        api_key: sent as a bearer token with each call.
        tls: None: no TLS, unless the address says grpcs:.
        timeout: seconds for a call that names no time of its own, retries included.
        retry: how a failing server is tried again.
        call_metadata: sent with each call.
    """

    address: str | None
    api_key: str | None = field(default=None, repr=False)
    tls: Tls | None = None
    timeout: float = DEFAULT_TIMEOUT
    retry: Retry = DEFAULT_RETRY
    call_metadata: CallMetadata = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.api_key is not None:
            if not isinstance(self.api_key, str):
                raise TypeError(f"api_key must be a str, not {type(self.api_key).__name__}")
            if not _VISIBLE.fullmatch(self.api_key):
                raise ValueError("api_key must be printable ASCII without white space around it, and not empty")
        seconds(self.timeout, "timeout")
        _metadata_pairs(self.call_metadata)
        scheme = target(self.address)[1] if self.address is not None else "a channel"
        if self.tls is not None and scheme in ("grpc", "a channel"):
            raise ValueError(f"tls is given, but the address is {scheme}, which has its own; use grpcs: or host:port")

    @property
    def target(self) -> str:
        """The address in gRPC's terms."""
        return target(self.address or "")[0]

    def credentials(self) -> grpc.ChannelCredentials | None:
        """What secures a channel to the address; None: nothing does."""
        if self.tls is not None:
            return self.tls.credentials()
        return Tls().credentials() if target(self.address or "")[1] == "grpcs" else None

    def options(self) -> list[tuple[str, str | int]]:
        """Options of the channel."""
        longest = max(100, round(self.retry.longest * 1000))
        options: list[tuple[str, str | int]] = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.enable_http_proxy", 0),
            # gRPC's own pauses between connections grow to two minutes, in which each of our attempts would fail unsent.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", longest),
            # A client is a connection: clients of one process neither share one nor the pauses after its failures.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if self.tls is not None and self.tls.server_name:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return options

    def metadata(self, more: CallMetadata | None) -> tuple[str, tuple[tuple[str, str | bytes], ...]]:
        """The request id of a call, and all its metadata. What the call itself brings along goes first."""
        pairs: dict[str, str | bytes] = {REQUEST_ID: uuid.uuid4().hex}
        if self.api_key is not None:
            pairs[AUTHORIZATION] = f"Bearer {self.api_key}"
        pairs |= _metadata_pairs(self.call_metadata) | _metadata_pairs(more or {})
        return str(pairs[REQUEST_ID]), tuple(pairs.items())

    def call_timeout(self, timeout: float | None) -> float:
        """Seconds that a call has."""
        return self.timeout if timeout is None else seconds(timeout, "timeout")


def timeout_or_infinity(timeout: float | None) -> float:
    """Seconds that something has which lasts as long as a rollout, unless it is told otherwise."""
    return math.inf if timeout is None else seconds(timeout, "timeout")


def seconds(value: float, where: str) -> float:
    """A number of seconds, 0 or more, also infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{where} must be a number of seconds, not {type(value).__name__}")
    if not value >= 0:
        raise ValueError(f"{where} must be a number of seconds, 0 or more")
    return float(value)


def target(address: str) -> tuple[str, str]:
    """An address in gRPC's terms, and its scheme: grpc, grpcs, unix or none. Raises TypeError and ValueError.

    The address stands in no text of theirs: it may hold a password.
    """
    if not isinstance(address, str):
        raise TypeError(f"address must be a str, not {type(address).__name__}")
    if address.startswith("unix:"):
        if not address.removeprefix("unix:").strip("/"):
            raise ValueError("address: unix: needs the path of a socket")
        return address, "unix"
    scheme, separator, rest = address.rpartition("://")
    scheme = scheme.lower()
    if separator and scheme not in ("grpc", "grpcs"):
        raise ValueError(f"address: there are {_FORMS}")
    try:
        parts = urlsplit(f"//{rest}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(f"address is none of {_FORMS}; an IPv6 host stands in brackets") from None
    if "@" in rest:
        raise ValueError("address must not hold a user name or password; use api_key")
    if (
        not host
        or parts.path.strip("/")
        or parts.query
        or parts.fragment
        or not _VISIBLE.fullmatch(rest)
        or " " in rest
    ):
        raise ValueError(f"address is none of {_FORMS}")
    if port is None and scheme != "grpcs":
        raise ValueError("address needs a port, such as localhost:50051")
    return f"{parts.netloc.rstrip(':')}:443" if port is None else parts.netloc, scheme


def _metadata_pairs(metadata: CallMetadata) -> dict[str, str | bytes]:
    """Metadata as gRPC takes it. Values stand in no error: some are secrets."""
    if not isinstance(metadata, Mapping):
        raise TypeError(f"call_metadata must be a mapping, not {type(metadata).__name__}")
    pairs: dict[str, str | bytes] = {}
    for key, value in metadata.items():
        name = key.lower() if isinstance(key, str) else ""
        if not _KEY.fullmatch(name) or name.startswith("grpc-"):
            raise ValueError(f"call_metadata: {key!r} cannot be a key of gRPC metadata")
        binary = name.endswith("-bin")
        if not isinstance(value, bytes if binary else str):
            raise TypeError(f"call_metadata[{name!r}] must be {'bytes' if binary else 'a str'}")
        if isinstance(value, str) and value and not _VISIBLE.fullmatch(value):
            raise ValueError(f"call_metadata[{name!r}] must be printable ASCII without white space around it")
        pairs[name] = value
    return pairs


def _read_pem(pem: Pem | None, name: str) -> bytes | None:
    if pem is None:
        return None
    if isinstance(pem, str) and "-----BEGIN" in pem:
        raise ValueError(f"{name} is a text, which is the name of a file; give PEM itself as bytes")
    content = pem if isinstance(pem, bytes) else Path(pem).read_bytes()
    if b"-----BEGIN" not in content:
        raise ValueError(f"{name} is no PEM")
    return content

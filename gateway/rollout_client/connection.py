"""Connection settings: server address, TLS, gRPC channel options and call metadata."""

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
# Printable ASCII without spaces at either end, which do not arrive: the transport strips them.
_VISIBLE: Final = re.compile(r"[!-~](?:[ -~]*[!-~])?")


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS settings of the connection. A str or Path names a PEM file; bytes are PEM content.

    Args:
        ca: trusted certificate authorities. None: gRPC's default roots.
        certificate: the client's certificate chain, for mutual TLS. Requires `key`.
        key: private key of `certificate`.
        server_name: name in the server's certificate, if it differs from the host in the address.

    Raises ValueError if only one of `certificate` and `key` is given. Files are read when the client is created.
    """

    ca: Pem | None = None
    certificate: Pem | None = None
    key: Pem | None = field(default=None, repr=False)
    server_name: str = ""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key must be given together")

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files. Raises OSError if a file cannot be read, ValueError if it is not PEM."""
        read = {name: _read_pem(getattr(self, name), name) for name in ("ca", "certificate", "key")}
        return grpc.ssl_channel_credentials(read["ca"], read["key"], read["certificate"])


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that both clients share.

    Args:
        address: address of the server. None: the caller supplied a channel.
        api_key: sent as a bearer token with each call.
        tls: None: no TLS, except for a grpcs: address.
        timeout: default timeout of a call in seconds, for all its attempts together.
        retry: retry policy.
        call_metadata: gRPC metadata of every call.

    Raises TypeError or ValueError for a value that cannot be used. The text never contains the API key.
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
                raise ValueError("api_key must be non-empty printable ASCII without leading or trailing white space")
        seconds(self.timeout, "timeout")
        _metadata_pairs(self.call_metadata)
        scheme = target(self.address)[1] if self.address is not None else "a channel"
        if self.tls is not None and scheme in ("grpc", "a channel"):
            raise ValueError(
                f"tls is given, but the address ({scheme}) already decides about TLS; use grpcs: or host:port"
            )

    @property
    def target(self) -> str:
        """The address in gRPC's target syntax."""
        return target(self.address or "")[0]

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Return the channel credentials, or None for a channel without TLS."""
        if self.tls is not None:
            return self.tls.credentials()
        return Tls().credentials() if target(self.address or "")[1] == "grpcs" else None

    def options(self) -> list[tuple[str, str | int]]:
        """Return the gRPC channel options."""
        longest = max(100, round(self.retry.longest * 1000))
        options: list[tuple[str, str | int]] = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            # While a call is open, pings detect a dead connection within 40 s, also on a stream without events.
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.enable_http_proxy", 0),
            # gRPC's own reconnect backoff grows to 2 minutes. Every attempt in that time would fail without being sent.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", longest),
            # One connection per client. By default gRPC shares connections, and their backoff, within a process.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if self.tls is not None and self.tls.server_name:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return options

    def metadata(self, more: CallMetadata | None) -> tuple[str, tuple[tuple[str, str | bytes], ...]]:
        """Return a call's request id and all its metadata. `more`, the metadata of this call, takes precedence."""
        pairs: dict[str, str | bytes] = {REQUEST_ID: uuid.uuid4().hex}
        if self.api_key is not None:
            pairs[AUTHORIZATION] = f"Bearer {self.api_key}"
        pairs |= _metadata_pairs(self.call_metadata) | _metadata_pairs(more or {})
        return str(pairs[REQUEST_ID]), tuple(pairs.items())

    def call_timeout(self, timeout: float | None) -> float:
        """Return the timeout of a call in seconds. None stands for the client's default."""
        return self.timeout if timeout is None else seconds(timeout, "timeout")


def timeout_or_infinity(timeout: float | None) -> float:
    """Return a timeout in seconds; None means no limit. For calls that last as long as a rollout."""
    return math.inf if timeout is None else seconds(timeout, "timeout")


def seconds(value: float, where: str) -> float:
    """Check a number of seconds: 0 or more, may be infinite. Raises TypeError and ValueError that name `where`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{where} must be a number of seconds, not {type(value).__name__}")
    if not value >= 0:
        raise ValueError(f"{where} must be a number of seconds, 0 or more")
    return float(value)


def target(address: str) -> tuple[str, str]:
    """Return an address in gRPC's target syntax, and its scheme: "grpc", "grpcs", "unix" or "".

    Raises TypeError and ValueError. Their texts omit the address, because it may contain a password.
    """
    if not isinstance(address, str):
        raise TypeError(f"address must be a str, not {type(address).__name__}")
    if address.startswith("unix:"):
        if not address.removeprefix("unix:").strip("/"):
            raise ValueError("address: unix: must be followed by the path of a socket")
        return address, "unix"
    scheme, separator, rest = address.rpartition("://")
    scheme = scheme.lower()
    if separator and scheme not in ("grpc", "grpcs"):
        raise ValueError(f"address has an unknown scheme; use {_FORMS}")
    try:
        parts = urlsplit(f"//{rest}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(f"address must be {_FORMS}; put an IPv6 host in brackets") from None
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
        raise ValueError(f"address must be {_FORMS}")
    if port is None and scheme != "grpcs":
        raise ValueError("address must have a port, such as localhost:50051")
    return f"{parts.netloc.rstrip(':')}:443" if port is None else parts.netloc, scheme


def _metadata_pairs(metadata: CallMetadata) -> dict[str, str | bytes]:
    """Check call metadata. Error texts omit the values, because some are secrets."""
    if not isinstance(metadata, Mapping):
        raise TypeError(f"call_metadata must be a mapping, not {type(metadata).__name__}")
    pairs: dict[str, str | bytes] = {}
    for key, value in metadata.items():
        name = key.lower() if isinstance(key, str) else ""
        if not _KEY.fullmatch(name) or name.startswith("grpc-"):
            raise ValueError(f"call_metadata: {key!r} is not a valid key of gRPC metadata")
        binary = name.endswith("-bin")
        if not isinstance(value, bytes if binary else str):
            raise TypeError(f"call_metadata[{name!r}] must be {'bytes' if binary else 'a str'}")
        if isinstance(value, str) and value and not _VISIBLE.fullmatch(value):
            raise ValueError(f"call_metadata[{name!r}] must be printable ASCII without leading or trailing white space")
        pairs[name] = value
    return pairs


def _read_pem(pem: Pem | None, name: str) -> bytes | None:
    if pem is None:
        return None
    if isinstance(pem, str) and "-----BEGIN" in pem:
        raise ValueError(f"{name} is PEM content in a str, and a str names a file; pass the content as bytes")
    content = pem if isinstance(pem, bytes) else Path(pem).read_bytes()
    if b"-----BEGIN" not in content:
        raise ValueError(f"{name} does not contain PEM")
    return content

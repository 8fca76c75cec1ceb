"""TLS of gRPC: a server's certificate, which may be replaced while the server runs, and what our own channels trust.

gRPC asks for the certificate at the beginning of every handshake, so files that were replaced hold for connections from then on,
and connections that exist live on. Files that cannot be used are not: those before stay in force, and the log says why.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import grpc

_log = logging.getLogger(__name__)
_Stamp: TypeAlias = "tuple[tuple[int, int, int, int] | None, ...]"


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM files of a server: certificate with its chain, the key without a password, and for mTLS the CAs of its clients."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @property
    def files(self) -> Sequence[Path]:
        """All that are read."""
        return [path for path in (self.certificate, self.key, self.client_ca) if path is not None]


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files of a client: the CAs it trusts (None: the system's), and certificate and key where servers ask for them."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Credentials that follow their files. With `client_ca` only clients with a certificate of one of its CAs get in.

    Raises OSError or ValueError, naming the file, where the files cannot be used from the start.
    """
    source = _Source(tls)
    # gRPC takes None for no change, which its types do not say.
    return grpc.dynamic_ssl_server_credentials(source.first, source, tls.client_ca is not None)  # type: ignore[arg-type]


def channel_credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    """Credentials of a channel. Raises OSError or ValueError, naming the file."""
    if (tls.certificate is None) != (tls.key is None):
        raise ValueError("a TLS certificate needs its key, and a key its certificate: only one of the two is set")
    roots = _certificates(tls.ca) if tls.ca is not None else _system_roots()
    if tls.certificate is None or tls.key is None:
        return grpc.ssl_channel_credentials(roots)
    chain, key = _pair(tls.certificate, tls.key)
    return grpc.ssl_channel_credentials(roots, key, chain)


class _Source:
    """Is called by threads of gRPC at each handshake: looks at the files, and reads them only where they have changed."""

    def __init__(self, tls: ServerTls) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._stamp = _stamp(tls.files)
        self.first = _configuration(tls)

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        """What is in force from now on; None: what was before."""
        stamp = _stamp(self._tls.files)
        with self._lock:
            if stamp == self._stamp:
                return None
            self._stamp = stamp
        try:
            configuration = _configuration(self._tls)
        except (OSError, ValueError) as error:
            _log.error("the TLS files have changed and cannot be used; those before stay in force: %s", error)
            return None
        _log.info("the TLS certificate in %s was read anew", self._tls.certificate)
        return configuration


def _configuration(tls: ServerTls) -> grpc.ServerCertificateConfiguration:
    chain, key = _pair(tls.certificate, tls.key)
    roots = _certificates(tls.client_ca) if tls.client_ca is not None else None
    return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=roots)


def _stamp(files: Sequence[Path]) -> _Stamp:
    return tuple(_stamp_of(path) for path in files)


def _stamp_of(path: Path) -> tuple[int, int, int, int] | None:
    """What changes when a file does, or when it may be read again; None: there is none."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _pair(certificate: Path, key: Path) -> tuple[bytes, bytes]:
    """Chain and key. A change while they are read is seen by the next stamp, and gRPC itself takes no pair that does not fit."""
    chain, secret = _certificates(certificate), _read(key, "key")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, _no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"the TLS key in {key} does not belong to the certificate in {certificate}") from None
        raise ValueError(f"{key} holds no TLS key in PEM without a password") from None
    return chain, secret


def _no_password() -> str:
    """Without it OpenSSL would ask at the terminal."""
    return ""


def _certificates(path: Path) -> bytes:
    pem = _read(path, "certificate")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError):
        raise ValueError(f"{path} holds no TLS certificate in PEM") from None
    return pem


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise OSError(error.errno, f"cannot read the TLS {what} in {path}: {error.strerror}") from None


def _system_roots() -> bytes | None:
    """The CAs that this machine trusts (SSL_CERT_FILE counts); None where there is no such file: those that come with gRPC."""
    path = ssl.get_default_verify_paths().cafile
    return _certificates(Path(path)) if path is not None else None

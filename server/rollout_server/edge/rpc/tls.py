"""TLS for gRPC: the server's certificate, which can be replaced while the server runs, and the CAs that client channels trust.

gRPC requests the certificate at each handshake. Replaced files therefore apply to new connections; existing connections
continue. If the new files are invalid, the previous certificate stays in force and the log says why.
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
    """PEM files of a server: certificate chain, key without password, and for mTLS the CAs of its clients."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @property
    def files(self) -> Sequence[Path]:
        """All configured files."""
        return [path for path in (self.certificate, self.key, self.client_ca) if path is not None]


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files of a client: trusted CAs (None: the system's), and certificate and key for servers that require them."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Return credentials that follow changes of their files.

    With `client_ca`, clients need a certificate of one of its CAs. Raises OSError or ValueError with the file's name if the
    files are invalid at the start.
    """
    source = _Source(tls)
    # The callback may return None for "no change", which gRPC's type stubs omit.
    return grpc.dynamic_ssl_server_credentials(source.first, source, tls.client_ca is not None)  # type: ignore[arg-type]


def channel_credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    """Return the credentials of a channel. Raise OSError or ValueError with the file's name."""
    if (tls.certificate is None) != (tls.key is None):
        raise ValueError("only one of TLS certificate and TLS key is set; set both or none")
    roots = _certificates(tls.ca) if tls.ca is not None else _system_roots()
    if tls.certificate is None or tls.key is None:
        return grpc.ssl_channel_credentials(roots)
    chain, key = _pair(tls.certificate, tls.key)
    return grpc.ssl_channel_credentials(roots, key, chain)


class _Source:
    """Callback for gRPC's threads at each handshake: checks the files and reads them only after a change."""

    def __init__(self, tls: ServerTls) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._stamp = _stamp(tls.files)
        self.first = _configuration(tls)

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the new configuration, or None if it is unchanged."""
        stamp = _stamp(self._tls.files)
        with self._lock:
            if stamp == self._stamp:
                return None
            self._stamp = stamp  # before reading: of several concurrent handshakes, only one reads the files
        try:
            configuration = _configuration(self._tls)
        except (OSError, ValueError) as error:
            _log.error("the changed TLS files cannot be used, the previous certificate stays in force: %s", error)
            return None
        _log.info("the changed TLS certificate in %s was loaded", self._tls.certificate)
        return configuration


def _configuration(tls: ServerTls) -> grpc.ServerCertificateConfiguration:
    chain, key = _pair(tls.certificate, tls.key)
    roots = _certificates(tls.client_ca) if tls.client_ca is not None else None
    return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=roots)


def _stamp(files: Sequence[Path]) -> _Stamp:
    return tuple(_stamp_of(path) for path in files)


def _stamp_of(path: Path) -> tuple[int, int, int, int] | None:
    """Return a value that changes when the file's content or permissions change; None if there is no file."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _pair(certificate: Path, key: Path) -> tuple[bytes, bytes]:
    """Return certificate chain and key.

    If a file changes during the read, the next stamp differs and both are read again. gRPC itself rejects a pair that does not
    match.
    """
    chain, secret = _certificates(certificate), _read(key, "key")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, _no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"the TLS key in {key} does not belong to the certificate in {certificate}") from None
        raise ValueError(f"{key} contains no TLS key in PEM without a password") from None
    return chain, secret


def _no_password() -> str:
    """Return an empty password. Without this callback OpenSSL would prompt at the terminal."""
    return ""


def _certificates(path: Path) -> bytes:
    pem = _read(path, "certificate")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError):
        raise ValueError(f"{path} contains no TLS certificate in PEM") from None
    return pem


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise OSError(error.errno, f"cannot read the TLS {what} in {path}: {error.strerror}") from None


def _system_roots() -> bytes | None:
    """Return the CAs that this machine trusts (SSL_CERT_FILE applies); None, for gRPC's built-in CAs, if there is no such file."""
    path = ssl.get_default_verify_paths().cafile
    return _certificates(Path(path)) if path is not None else None

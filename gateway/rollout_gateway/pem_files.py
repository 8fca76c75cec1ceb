"""Certificates and keys in files: read, checked, and noticed when they change."""

import ssl
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate with its chain, and its key without a passphrase; both in PEM."""

    cert: Path
    key: Path


def read(path: Path, what: str) -> bytes:
    """What a file holds. Raises ValueError that names it."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{what} {path} cannot be read: {error.strerror}") from None


def load_pair(context: ssl.SSLContext, pair: KeyPair) -> None:
    """Loads certificate and key into a context. Raises ValueError that names the file at fault, never what is in it."""
    load_authorities(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), pair.cert, "the certificate")
    read(pair.key, "the key")
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(pair.cert, pair.key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"the key {pair.key} does not belong to the certificate {pair.cert}") from None
        raise ValueError(f"{pair.key} holds no key in PEM that can be read without a passphrase") from None
    except OSError as error:
        raise ValueError(f"{pair.cert} or {pair.key} cannot be read: {error.strerror}") from None


def load_authorities(context: ssl.SSLContext, path: Path, what: str = "the authority's certificates") -> None:
    """Loads the authorities that a context trusts. Raises ValueError that names the file."""
    read(path, what)
    try:
        context.load_verify_locations(path)
    except OSError:
        raise ValueError(f"{path} holds no certificate in PEM") from None


class Watch:
    """Tells when files have changed."""

    def __init__(self, paths: tuple[Path, ...]) -> None:
        self._paths = paths
        self._taken = self._seen = self._look()

    def changed(self) -> bool:
        """Whether they have since the last time it said so. Not while they still change: they are written one by one."""
        found = self._look()
        settled, self._seen = found == self._seen, found
        if not settled or found == self._taken:
            return False
        self._taken = found
        return True

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_print(path) for path in self._paths)


def _print(path: Path) -> tuple[int, int, int] | None:
    # Links are followed: a mounted secret is a link that is put elsewhere.
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino

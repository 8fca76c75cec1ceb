"""Certificates and keys in files: reading, checking, and reloading after a change."""

import logging
import ssl
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


class KeyPair(NamedTuple):
    """PEM files of a certificate with its chain and of its private key, which has no passphrase."""

    cert: Path
    key: Path

    @classmethod
    def of(cls, cert: Path | None, key: Path | None) -> "KeyPair | None":
        """Return the pair; None unless both files are given."""
        return cls(cert, key) if cert is not None and key is not None else None


def read(path: Path, what: str) -> bytes:
    """Return the content of a file. Raises ValueError that names the file; `what` says what it contains."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{what} {path} cannot be read: {error.strerror}") from None


def load_pair(context: ssl.SSLContext, pair: KeyPair) -> None:
    """Load certificate and key into a context. Raises ValueError that names the file at fault but never quotes it."""
    load_authorities(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), pair.cert, "the certificate")
    read(pair.key, "the key")
    try:
        # Without the empty password OpenSSL would prompt for one on the terminal.
        context.load_cert_chain(pair.cert, pair.key, password="")
    except OSError as error:
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            raise ValueError(f"the key {pair.key} does not belong to the certificate {pair.cert}") from None
        raise ValueError(f"{pair.key} contains no key in PEM format that can be read without a passphrase") from None


def load_authorities(context: ssl.SSLContext, path: Path, what: str = "the authority's certificates") -> None:
    """Load the certificate authorities that a context trusts. Raises ValueError that names the file."""
    read(path, what)
    try:
        context.load_verify_locations(path)
    except OSError:
        raise ValueError(f"{path} contains no certificate in PEM format") from None


class Reloaded(Generic[_T]):
    """A value made from files and rebuilt when they change. If the new files cannot be used, the old value stays.

    `make` raises ValueError for files that cannot be used; `what` names the value in the log.
    """

    def __init__(self, paths: Iterable[Path | None], make: Callable[[], _T], what: str) -> None:
        self._paths = [path for path in paths if path is not None]
        self._make = make
        self._what = what
        self._seen = self._stamp()
        self.value = make()

    def look(self) -> _T:
        """Check the files for changes and return the current value."""
        seen, self._seen = self._seen, self._stamp()
        if self._seen != seen:
            try:
                self.value = self._make()
                _LOG.info("%s was replaced", self._what)
            except ValueError as error:
                # As text: a log record with the exception would keep its frames alive, and the secrets in them.
                _LOG.error("%s is kept: %s", self._what, str(error))
        return self.value

    def _stamp(self) -> list[tuple[int, int, int] | None]:
        # stat follows links: a mounted Kubernetes Secret is a link whose target changes.
        return [_print(path) for path in self._paths]


def _print(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino

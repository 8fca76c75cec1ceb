"""Certificates and keys in files: read, checked, and read anew when they change."""

import logging
import ssl
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


class KeyPair(NamedTuple):
    """A certificate with its chain, and its key without a passphrase; both in PEM."""

    cert: Path
    key: Path

    @classmethod
    def of(cls, cert: Path | None, key: Path | None) -> "KeyPair | None":
        """Those of a setting that may be left out."""
        return cls(cert, key) if cert is not None and key is not None else None


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
    except OSError as error:
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            raise ValueError(f"the key {pair.key} does not belong to the certificate {pair.cert}") from None
        raise ValueError(f"{pair.key} holds no key in PEM that can be read without a passphrase") from None


def load_authorities(context: ssl.SSLContext, path: Path, what: str = "the authority's certificates") -> None:
    """Loads the authorities that a context trusts. Raises ValueError that names the file."""
    read(path, what)
    try:
        context.load_verify_locations(path)
    except OSError:
        raise ValueError(f"{path} holds no certificate in PEM") from None


class Reloaded(Generic[_T]):
    """What is made of files, and made anew once they have changed. A change that cannot be used leaves it as it was.

    `make` raises ValueError for files that cannot be used; `what` names it in the log.
    """

    def __init__(self, paths: Iterable[Path | None], make: Callable[[], _T], what: str) -> None:
        self._paths = [path for path in paths if path is not None]
        self._make = make
        self._what = what
        self._seen = self._stamp()
        self.value = make()

    def look(self) -> _T:
        """The value that is in force after a look at the files."""
        seen, self._seen = self._seen, self._stamp()
        if self._seen != seen:
            try:
                self.value = self._make()
                _LOG.info("%s was replaced", self._what)
            except ValueError as error:
                # As text: who keeps the record would keep the frames of the error, and what they hold.
                _LOG.error("%s is kept: %s", self._what, str(error))
        return self.value

    def _stamp(self) -> list[tuple[int, int, int] | None]:
        # Links are followed: a mounted secret is a link that is put elsewhere.
        return [_print(path) for path in self._paths]


def _print(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino

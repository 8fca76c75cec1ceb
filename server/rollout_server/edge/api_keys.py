"""API keys: identify callers. Wrong keys are logged by their hash, never in clear text, and many of them are answered slowly.

A key is a long random text, so its SHA-256 is enough to store: a slow password hash would not make it harder to guess. Two keys
with one name are one caller. To replace a key, add the new one, move its users, and remove the old one.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollout_server.core.error import Unauthenticated
from rollout_server.runtime.start_request import Caller

_log = logging.getLogger(__name__)
ANONYMOUS = "anonymous"
_ENTRY = re.compile(r"(?P<name>[A-Za-z0-9_.@-]{1,64})[ \t]+sha256:(?P<digest>[0-9a-fA-F]{64})(?P<admin>[ \t]+admin)?")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A stored key: the caller it identifies, and the SHA-256 of its text."""

    caller: Caller
    digest: bytes = field(repr=False)


def new_key() -> str:
    """Return a random key."""
    return f"rk_{secrets.token_urlsafe(32)}"


def entry_of(name: str, key: str, *, admin: bool = False) -> str:
    """Return the line for a key in a file or setting. Raise ValueError for an invalid name."""
    line = f"{name} sha256:{_digest(key).hex()}{' admin' if admin else ''}"
    if _ENTRY.fullmatch(line) is None or name == ANONYMOUS:
        raise ValueError(
            f"a key's name must have 1 to 64 characters of A-Z a-z 0-9 _ . @ - and must not be {ANONYMOUS!r}"
        )
    return line


def key_of(name: str, text: str, *, admin: bool = False) -> ApiKey:
    """Return a key whose text is known. Raise ValueError for a text that a header cannot carry."""
    if not text or not text.isascii() or not text.isprintable() or text != text.strip():
        raise ValueError("a key must be printable ASCII without spaces around it, because it is sent in a header")
    return ApiKey(Caller(name, admin), _digest(text))


def read_entries(lines: Iterable[str], where: str) -> Sequence[ApiKey]:
    """Parse keys, one per entry: `NAME sha256:HEX`, followed by ` admin` for an admin key.

    Raises ValueError with the number of the entry.
    """
    keys = []
    for number, line in enumerate(lines, start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        found = _ENTRY.fullmatch(entry)
        if found is None or found["name"] == ANONYMOUS:
            raise ValueError(
                f"{where}, entry {number}: needs NAME sha256:HEX, or NAME sha256:HEX admin (see `rollout keys new`)"
            )
        if bytes.fromhex(found["digest"]) == _digest(""):  # a request without a key would match it
            raise ValueError(f"{where}, entry {number}: is the hash of an empty key")
        keys.append(ApiKey(Caller(found["name"], found["admin"] is not None), bytes.fromhex(found["digest"])))
    return keys


class Keyring:
    """The keys in force: fixed ones, and those of a file that may change while the server runs."""

    def __init__(self, keys: Sequence[ApiKey], file: Path | None = None) -> None:
        """Read the file. Raise OSError or ValueError if it cannot be read."""
        self._given = tuple(keys)
        self._file = file
        self._stamp: tuple[int, ...] | None = None
        self._complaint = ""
        self._internal: tuple[ApiKey, ...] = ()
        self._filed: Sequence[ApiKey] = ()
        if file is not None:
            self._stamp = _stamp(file)
            self._filed = _read(file)

    @property
    def demands(self) -> bool:
        """Whether callers need a key. True for an empty file of keys, too."""
        return bool(self._given) or self._file is not None

    def anonymous_key(self, text: str = "") -> str:
        """Return a key for callers that are admitted without a key of their own: this one, or by default a new one."""
        text = text or new_key()
        self._internal = (*self._internal, ApiKey(Caller(ANONYMOUS), _digest(text)))
        return text

    def caller(self, authorization: str | None) -> Caller:
        """Return the caller that sent this header: `Bearer KEY`, or the key alone. Raise `Unauthenticated`.

        All keys are compared, each in constant time, so the response time does not depend on which key matches.
        """
        if not self.demands:
            return Caller(ANONYMOUS)
        digest = _digest(bare_key(authorization or ""))
        found: Caller | None = None
        for key in (*self._given, *self._filed, *self._internal):
            if hmac.compare_digest(key.digest, digest):
                found = key.caller
        if found is None:
            raise Unauthenticated("Invalid or missing API key")
        return found

    def refresh(self, changed: Callable[[], None] = lambda: None) -> None:
        """Read the file again if it changed, then call `changed`. If it cannot be read, keep the previous keys."""
        if self._file is None:
            return
        try:
            stamp = _stamp(self._file)
            if stamp == self._stamp:
                return
            self._filed = _read(self._file)
            # Only after a successful read: a temporary read error may disappear without a change of the file.
            self._stamp = stamp
        except (OSError, ValueError) as error:
            if str(error) != self._complaint:  # log a lasting error once
                _log.error("the API keys stay unchanged, their file cannot be used: %s", error)
            self._complaint = str(error)
            return
        self._complaint = ""
        _log.info("%d API keys were read from the changed file", len(self._filed))
        changed()


def fingerprint(authorization: str) -> str:
    """Return the first 12 hex digits of the hash of a header's key: enough to find its entry, too few to use it."""
    return _digest(bare_key(authorization)).hex()[:12]


def bare_key(authorization: str) -> str:
    """Return the key of a header: `Bearer KEY`, or the key alone."""
    scheme, _, rest = authorization.strip().partition(" ")
    return rest.strip() if scheme.lower() == "bearer" else authorization.strip()


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _stamp(file: Path) -> tuple[int, ...]:
    """Return a value that changes with contents, owner and permissions: an unreadable file may become readable."""
    status = file.stat()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def _read(file: Path) -> Sequence[ApiKey]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 text") from None
    return read_entries(text.splitlines(), str(file))


BURST = 20
PER_SECOND = 10
"""Token bucket: `BURST` wrong keys, then `PER_SECOND` per second, are answered at once and logged individually."""
DELAY_SECONDS = 1.0
"""Delay before a wrong key beyond that rate is answered."""


class WrongKeys:
    """Counts the wrong keys of all callers together, so that its memory does not grow with their number.

    Valid keys are never delayed, so one caller's wrong keys do not slow down others.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._recent = 0.0
        self._counted = clock()
        self._unlogged = 0

    def record(self, authorization: str | None, peer: str) -> float:
        """Count a refused header. Return the delay of the response in seconds; a request without a key is not delayed."""
        if authorization is None:
            return 0.0
        now = self._clock()
        self._recent = max(0.0, self._recent - PER_SECOND * (now - self._counted)) + 1
        self._counted = now
        if self._recent > BURST:
            self._unlogged += 1
            return DELAY_SECONDS
        more, self._unlogged = self._unlogged, 0
        before = f"; {more} more were refused before it" if more else ""
        _log.warning("refused the API key with hash sha256:%s... from %s%s", fingerprint(authorization), peer, before)
        return 0.0

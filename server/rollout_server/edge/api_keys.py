"""API keys: who calls. Wrong ones are logged by their hash, never by their text, and many of them are answered slowly.

A key is a long random text, so its SHA-256 is all that has to be kept: there is nothing to guess that a slower hash would protect.
Two keys of one name are one caller, which is how a key is replaced: add the new one, move its users, drop the old one.
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
    """A key as it is kept: the caller it stands for, and the SHA-256 of its text."""

    caller: Caller
    digest: bytes = field(repr=False)


def new_key() -> str:
    """A key that nobody can guess."""
    return f"rk_{secrets.token_urlsafe(32)}"


def entry_of(name: str, key: str, *, admin: bool = False) -> str:
    """The line that stands for a key in a file or setting. Raises ValueError for a name that cannot stand there."""
    line = f"{name} sha256:{_digest(key).hex()}{' admin' if admin else ''}"
    if _ENTRY.fullmatch(line) is None or name == ANONYMOUS:
        raise ValueError(f"a key's name has 1 to 64 characters of A-Z a-z 0-9 _ . @ - and is not {ANONYMOUS!r}")
    return line


def key_of(name: str, text: str, *, admin: bool = False) -> ApiKey:
    """A key whose text is known. Raises ValueError for one that no header can carry."""
    if not text or not text.isascii() or not text.isprintable() or text != text.strip():
        raise ValueError("a key is printable ASCII without spaces around it: it travels in a header")
    return ApiKey(Caller(name, admin), _digest(text))


def read_entries(lines: Iterable[str], where: str) -> Sequence[ApiKey]:
    """Keys, one an entry: `NAME sha256:HEX`, with ` admin` behind it for an admin's. Raises ValueError naming the place."""
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
        if bytes.fromhex(found["digest"]) == _digest(""):  # whoever sends no key would be this caller
            raise ValueError(f"{where}, entry {number}: is the hash of an empty key")
        keys.append(ApiKey(Caller(found["name"], found["admin"] is not None), bytes.fromhex(found["digest"])))
    return keys


class Keyring:
    """The keys in force: those given once, and those of a file that may change while the server runs."""

    def __init__(self, keys: Sequence[ApiKey], file: Path | None = None) -> None:
        """Raises OSError or ValueError where the file cannot be read."""
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
        """Callers need a key. A file of keys demands one even while it is empty."""
        return bool(self._given) or self._file is not None

    def anonymous_key(self) -> str:
        """A key, made anew, for those who are let in without one."""
        text = new_key()
        self._internal = (*self._internal, ApiKey(Caller(ANONYMOUS), _digest(text)))
        return text

    def caller(self, authorization: str | None) -> Caller:
        """Who sends this header: `Bearer KEY`, or the key alone. Raises `Unauthenticated`.

        Every key is compared, each in constant time.
        """
        if not self.demands:
            return Caller(ANONYMOUS)
        digest = _digest(_bare(authorization or ""))
        found: Caller | None = None
        for key in (*self._given, *self._filed, *self._internal):
            if hmac.compare_digest(key.digest, digest):
                found = key.caller
        if found is None:
            raise Unauthenticated("Invalid or missing API key")
        return found

    def refresh(self, changed: Callable[[], None] = lambda: None) -> None:
        """Reads the file again if it changed, then calls `changed`. One that cannot be read leaves the keys as they were."""
        if self._file is None:
            return
        try:
            stamp = _stamp(self._file)
            if stamp == self._stamp:
                return
            self._filed = _read(self._file)
            self._stamp = stamp  # once it is read: what kept it from being read may pass without a trace in the file
        except (OSError, ValueError) as error:
            if str(error) != self._complaint:  # a file that stays away is told of once
                _log.error("API keys stay as they were: %s", error)
            self._complaint = str(error)
            return
        self._complaint = ""
        _log.info("API keys read again: %d of them", len(self._filed))
        changed()


def fingerprint(authorization: str) -> str:
    """The beginning of the hash of a header's key: enough to find the key among entries, and too little to be one."""
    return _digest(_bare(authorization)).hex()[:12]


def _bare(authorization: str) -> str:
    scheme, _, rest = authorization.strip().partition(" ")
    return rest.strip() if scheme.lower() == "bearer" else authorization.strip()


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _stamp(file: Path) -> tuple[int, ...]:
    """Changes with contents, owner and rights: a file that could not be read may become readable."""
    status = file.stat()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def _read(file: Path) -> Sequence[ApiKey]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is no text in UTF-8") from None
    return read_entries(text.splitlines(), str(file))


BURST = 20
PER_SECOND = 10
"""So many wrong keys, and then so many more each second, are answered at once and logged one by one."""
DELAY_SECONDS = 1.0


class WrongKeys:
    """Counts the wrong keys of all callers together, so that its memory does not grow with them.

    Right keys are never delayed, and so nobody suffers from the wrong ones of others.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._recent = 0.0
        self._counted = clock()
        self._unlogged = 0

    def record(self, authorization: str | None, peer: str) -> float:
        """Takes note of a refused header. Returns after how many seconds to answer; a request without a key is never delayed."""
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

"""Directories for the Unix sockets of servers, and removal of those that killed servers left behind."""

from __future__ import annotations

import errno
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SOCKET_PREFIX = "rollout-"
"""Prefix of the socket directories' names, in the system's temporary directory."""
SOCKET_NAME = "grpc.sock"
_MARK_NAME = "this-directory-is-in-use.sock"
"""Longer than the names of the sockets of workers, so that a directory whose path leaves no room for them is refused at once."""
_SETTLED_SECONDS = 60.0
"""Minimum age of a socket that is checked: a socket that is being opened refuses connections, too."""


@contextmanager
def own_socket() -> Iterator[Path]:
    """Yield the path for a server's socket, in a directory that only its user can enter."""
    remove_stale_sockets()
    with tempfile.TemporaryDirectory(prefix=SOCKET_PREFIX, ignore_cleanup_errors=True) as directory:
        yield Path(directory) / SOCKET_NAME


@contextmanager
def socket_directory() -> Iterator[Path]:
    """Yield a directory for the sockets of other processes of this user. It is not stale as long as this process lives."""
    with own_socket() as first, socket.socket(socket.AF_UNIX) as mark:
        path = first.with_name(_MARK_NAME)
        try:
            mark.bind(str(path))
        except OSError as error:
            raise OSError(f"{path} cannot be a Unix socket: {error}; let TMPDIR name another directory") from error
        mark.listen()
        yield path.parent


def remove_stale_sockets() -> None:
    """Remove directories that killed servers of this user left behind: those whose sockets have no listener.

    A directory that contains anything else, or no socket yet, is kept.
    """
    for directory in Path(tempfile.gettempdir()).glob(f"{SOCKET_PREFIX}*"):
        with suppress(OSError):
            paths = list(directory.iterdir()) if _is_own(directory.lstat(), stat.S_IFDIR) else []
            if paths and all(map(_is_stale, paths)):
                for path in paths:
                    path.unlink()
                directory.rmdir()


def _is_stale(path: Path) -> bool:
    """Return whether a path is a socket of this user without a listener. Raise OSError if it cannot be inspected."""
    found = path.lstat()
    if not _is_own(found, stat.S_IFSOCK) or time.time() - found.st_mtime < _SETTLED_SECONDS:
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a busy server accepts the connection or returns EAGAIN, not ECONNREFUSED
        return probe.connect_ex(str(path)) == errno.ECONNREFUSED


def _is_own(found: os.stat_result, kind: int) -> bool:
    return stat.S_IFMT(found.st_mode) == kind and found.st_uid == os.geteuid()

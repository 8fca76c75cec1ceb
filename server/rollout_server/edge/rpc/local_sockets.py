"""The directories of sockets over which gateways reach the servers of their processes, and what killed servers left of them."""

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

PREFIX = "rollout-"
"""How the name of such a directory begins. It is in the system's temporary directory."""
_SETTLED_SECONDS = 60.0
"""The age from which a socket is asked: one that is being opened refuses connections, too."""
NAME = "grpc.sock"


@contextmanager
def own_socket() -> Iterator[Path]:
    """Where a server opens its socket, in a directory that only its user can enter."""
    sweep()
    with tempfile.TemporaryDirectory(prefix=PREFIX) as directory:
        yield Path(directory) / NAME


def sweep() -> None:
    """Removes directories that servers of this user left behind when they were killed: those with a socket on which nobody listens.

    One that holds anything else, or is still without a socket, is left alone.
    """
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if _is_stale(directory):
                (directory / NAME).unlink()
                directory.rmdir()


def _is_stale(directory: Path) -> bool:
    """Raises OSError where it cannot be looked at."""
    own, path = os.geteuid(), directory / NAME
    about, held = directory.lstat(), path.lstat()
    if not stat.S_ISDIR(about.st_mode) or not stat.S_ISSOCK(held.st_mode) or {about.st_uid, held.st_uid} != {own}:
        return False
    if os.listdir(directory) != [NAME] or time.time() - held.st_mtime < _SETTLED_SECONDS:
        return False
    with socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)  # a server that is busy takes a connection as well, or says that its queue is full
        return asking.connect_ex(str(path)) == errno.ECONNREFUSED

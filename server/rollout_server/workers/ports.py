"""Ports that several processes listen on: found free, and held for as long as the parent lives."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

_LEFT_SECONDS: Final = 3.0


@contextmanager
def held_port(host: str, port: int) -> Iterator[int]:
    """Hold a port for the listeners of other processes, and yield its number; port 0 selects a free one.

    The socket never listens, so it receives no connections. While it is bound, only sockets with SO_REUSEPORT of this user can
    bind the port. Raises OSError if the port is in use for seconds, also by a server that shares its port.
    """
    with ExitStack() as stack:
        try:
            with _free(host, port) as probe:
                number: int = probe.getsockname()[1]
            try:
                held = _bound(host, number, socket.SO_REUSEPORT)
            except OSError:
                # Only closed connections of an earlier server are left there, which SO_REUSEADDR ignores. It is the second choice:
                # with it, a server that is not listening yet could bind the port, too.
                held = _bound(host, number, socket.SO_REUSEPORT, socket.SO_REUSEADDR)
            stack.enter_context(held)
        except OSError as error:
            raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
        yield number


def _free(host: str, port: int) -> socket.socket:
    """Bind a port on which nobody listens. The workers of a parent that was killed may have it for a moment."""
    ends = time.monotonic() + _LEFT_SECONDS
    while True:
        try:
            return _bound(host, port, socket.SO_REUSEADDR)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > ends:
                raise
        time.sleep(0.1)


def _bound(host: str, port: int, *options: int) -> socket.socket:
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        for option in options:
            found.setsockopt(socket.SOL_SOCKET, option, 1)
        found.bind((host, port))
    except OSError:
        found.close()
        raise
    return found

"""The process between the server and one of tools: it sees to it that nothing a tool has started outlives them.

Linux gives a process whose parent has ended to the nearest "subreaper" above it. This process is one, so it gets all that a tool
has started, also what left the tool's session or lost its parent on the way. Elsewhere only the tool's process group is ended.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_SET_PARENT_DEATH_SIGNAL, _SET_DUMPABLE, _SET_CHILD_SUBREAPER = 1, 4, 36
"""Numbers of `prctl`, from linux/prctl.h."""


def supervise(connection: socket.socket) -> None:
    """Forks, and returns in the child, which is to run the tools. The parent ends here, as its child did.

    Whichever comes first, the child's end or that of the connection to the server, ends all that is left.
    """
    _prctl(_SET_CHILD_SUBREAPER, 1)
    parent, worker = os.getpid(), os.fork()
    if worker:
        status = _wait(worker, connection)
        _exit_like(_end_all(worker, status))
    os.setsid()  # a tool that signals its group does not mean its supervisor
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def hide_memory() -> None:
    """Makes memory and environment of this process unreadable for others of its user, such as tools. It dumps no core then."""
    _prctl(_SET_DUMPABLE, 0)


def _wait(worker: int, connection: socket.socket) -> int | None:
    """How the worker ended; None where the server hung up before."""
    wakes, woken = socket.socketpair()
    wakes.setblocking(False)
    woken.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(woken, select.POLLIN)
    poll.register(connection, 0)  # what is always told: that the other side has hung up
    while True:
        ended = _reaped(worker)
        if ended is not None:
            return ended
        if any(number == connection.fileno() for number, _ in poll.poll()):
            return None
        with suppress(BlockingIOError):
            woken.recv(4096)


def _end_all(worker: int, status: int | None) -> int:
    """Kills the worker and all that came of it, and waits for that. Returns how the worker ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    while True:
        ended = _reaped(worker)
        status = ended if status is None else status
        left = list(_children())
        if not left and status is not None:
            return status
        for number in left:  # whose own children come here as soon as it is dead
            with suppress(ProcessLookupError, PermissionError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.005)


def _reaped(worker: int) -> int | None:
    """Takes note of all children that have ended. Returns how the worker did, if it is among them."""
    found = None
    with suppress(ChildProcessError):
        while True:
            number, status = os.waitpid(-1, os.WNOHANG)
            if not number:
                break
            found = status if number == worker else found
    return found


def _children() -> Iterator[int]:
    """The numbers of this process's children."""
    own = str(os.getpid())
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            _, parent, *_ = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if parent == own:
                yield int(path.parent.name)


def _exit_like(status: int) -> None:
    """Ends this process in the way that another did."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)

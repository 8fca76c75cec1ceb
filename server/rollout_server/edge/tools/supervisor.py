"""The process between the server and a tool process or program. It ensures that nothing they started outlives them.

On Linux, an orphaned process gets the nearest "subreaper" ancestor as its parent (prctl(2), PR_SET_CHILD_SUBREAPER). This
process is a subreaper, so it gets everything that a tool started, also processes that left the tool's session. On other systems
only the tool's process group is killed.

As a script it runs a program: `supervisor.py FILENO GRACE_SECONDS COMMAND...`. Only the standard library is imported here, so that
it starts quickly.
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
"""Option numbers of `prctl`, from linux/prctl.h."""


def supervise(connection: socket.socket, grace: float = 0.0) -> None:
    """Fork, and return in the child, which runs the tools. The parent never returns; it exits with the child's status.

    The end of the child or of the connection to the server, whichever comes first, kills all remaining processes. If it is the
    connection, the child's process group first gets SIGTERM, and the child `grace` seconds to end.
    """
    _prctl(_SET_CHILD_SUBREAPER, 1)
    parent, worker = os.getpid(), os.fork()
    if worker:
        status = _wait(worker, connection)
        if status is None and grace:
            status = _terminate(worker, grace)
        _exit_like(_end_all(worker, status))
    os.setsid()  # a signal that a tool sends to its process group must not reach the supervisor
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    # The supervisor may have died before prctl took effect; then no signal comes.
    if os.getppid() != parent:
        os._exit(1)


def hide_memory() -> None:
    """Make memory and environment of this process unreadable for other processes of its user, such as tools.

    It also disables core dumps of this process.
    """
    _prctl(_SET_DUMPABLE, 0)


def _wait(worker: int, connection: socket.socket) -> int | None:
    """Return the worker's exit status; None if the server closed the connection first."""
    wakes, woken = socket.socketpair()
    wakes.setblocking(False)
    woken.setblocking(False)
    # Self-pipe: SIGCHLD makes `woken` readable, so `poll` cannot miss a child that ends just before the call.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(woken, select.POLLIN)
    poll.register(connection, 0)  # no events: poll always reports POLLHUP, when the server closes the connection
    while True:
        ended = _reaped(worker)
        if ended is not None:
            return ended
        if any(number == connection.fileno() for number, _ in poll.poll()):
            return None
        with suppress(BlockingIOError):
            woken.recv(4096)


def _terminate(worker: int, grace: float) -> int | None:
    """Send SIGTERM to the worker's process group. Return the worker's exit status; None if it did not end in time."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGTERM)
    until, status = time.monotonic() + grace, None
    while status is None and time.monotonic() < until:
        time.sleep(0.005)
        status = _reaped(worker)
    return status


def _end_all(worker: int, status: int | None) -> int:
    """Kill the worker and all its descendants, and reap them. Return the worker's exit status."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    while True:
        ended = _reaped(worker)
        status = ended if status is None else status
        left = list(_children())
        if not left and status is not None:
            return status
        for (
            number,
            group,
        ) in left:  # their children become children of this process, so the loop repeats until none is left
            # A process that forks and exits all the time is gone before its number can be used. A signal to its group reaches the
            # child, too: no process of a group forks unseen while the group gets a signal.
            if group != os.getpgrp():
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
            with suppress(ProcessLookupError, PermissionError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.005)


def _reaped(worker: int) -> int | None:
    """Reap all children that have ended. Return the worker's exit status if it is among them."""
    found = None
    with suppress(ChildProcessError):
        while True:
            number, status = os.waitpid(-1, os.WNOHANG)
            if not number:
                break
            found = status if number == worker else found
    return found


def _children() -> Iterator[tuple[int, int]]:
    """Yield the process ids of this process's children, and their process groups."""
    own = str(os.getpid())
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            _, parent, group, *_ = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if parent == own:
                yield int(path.parent.name), int(group)


def _exit_like(status: int) -> None:
    """Exit with the same status or signal as another process."""
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


def _run_program(descriptor: int, grace: float, command: list[str]) -> None:
    """Replace the supervised child by a program. If it cannot be executed, send the reason to the server."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    supervise(connection, grace)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a program would inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606 - without a shell, which would have to quote
    except (OSError, ValueError) as error:
        connection.send(str(error).encode()[:1000])
        os._exit(127)


if __name__ == "__main__":
    _run_program(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])

"""The connection between a worker and its parent: a socket pair that carries one JSON object per line.

Worker to parent: {"up": SERVER_ID, "agents": [...]}, {"serving": true}, {"drained": true}. Parent to worker: first the plan, then
{"servers": [SERVER_ID, ...]} when all are up and whenever one has changed, and {"leave": true} when all have drained. The
connection ends with the process at its other end.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from rollout_server.workers.plan import WorkerPlan

LINK_VARIABLE: Final = "_ROLLOUT_WORKER_LINK"
"""Environment variable with the number of the worker's end of the link. Set in workers only, until they have read it."""
_SET_PARENT_DEATH_SIGNAL: Final = 1
"""Option number of `prctl`, from linux/prctl.h."""


def is_worker() -> bool:
    """Return whether this process was started as a worker, and has not taken its link yet."""
    return LINK_VARIABLE in os.environ


class ParentLink:
    """A worker's end of the link."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")
        self.plan = WorkerPlan(**json.loads(self._lines.readline()))
        self.servers: Sequence[str] = ()
        """Server ids of the workers, in their order; empty until all are up."""
        self.on_servers: Callable[[Sequence[str]], None] = lambda _: None
        """Called when they have changed."""
        self._complete, self._leave = asyncio.Event(), asyncio.Event()

    def listen(self) -> None:
        """Begin to listen, in a thread, which ends the process with the link. A blocked event loop does not delay that."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, args=(loop,), name="link to the parent", daemon=True).start()

    def send(self, **message: Any) -> None:
        """Send a message. The parent reads at all times, so this does not block."""
        with suppress(OSError):  # the parent is gone: the thread ends this process
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    async def joined(self) -> Sequence[str]:
        """Wait until all workers are up, and return their server ids."""
        await self._complete.wait()
        return self.servers

    async def released(self) -> None:
        """Wait until no worker needs this one any more."""
        await self._leave.wait()

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        for line in self._lines:
            loop.call_soon_threadsafe(self._take, json.loads(line))
        os._exit(1)

    def _take(self, message: dict[str, Any]) -> None:
        if "servers" in message:
            self.servers = message["servers"]
            self._complete.set()
            self.on_servers(self.servers)
        if "leave" in message:
            self._leave.set()


def take_link() -> ParentLink | None:
    """Return the link of this process if it is a worker. Programs that it starts inherit neither the variable nor the socket."""
    number = os.environ.pop(LINK_VARIABLE, "")
    if not number:
        return None
    connection = socket.socket(fileno=int(number))
    connection.set_inheritable(False)
    # A worker without its parent ends at once, as if it had been killed, too: its journal keeps the rollouts, and the next parent
    # needs its ports. The kernel also ends one that is stopped. If the parent is gone already, the end of the link does it.
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    return ParentLink(connection)

"""Processes that run under a supervisor, which ends everything that they start."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from rollout_server.edge.tools import supervisor

TERM_SECONDS = 1.0
"""How long a program may take to end after SIGTERM. Then it is killed."""
GRACE_SECONDS = 5.0
"""How long a supervisor may take to end all processes."""


@dataclass(frozen=True, slots=True)
class ProcessStart:
    """How to start a process.

    Args:
        command: the program and its arguments.
        directory: its working directory.
        environment: all its environment variables.
        has_stdin: whether its standard input is a pipe.
        limit: bytes of its output that are buffered.
    """

    command: Sequence[str]
    directory: Path
    environment: Mapping[str, str] = field(repr=False)
    has_stdin: bool
    limit: int


class SupervisedProcess:
    """A process and its supervisor. `process` is the supervisor, which exits as the process does; the pipes are the process's."""

    def __init__(self, process: asyncio.subprocess.Process, connection: socket.socket) -> None:
        self.process = process
        self.ended = asyncio.create_task(process.wait(), name=f"program {process.pid}")
        self._connection = connection

    @classmethod
    async def start(cls, start: ProcessStart) -> Self:
        """Start a process. Raise OSError, or ValueError for a command that cannot be one."""
        spawning = asyncio.create_task(cls._spawn(start), name="start of a program")
        try:
            return await asyncio.shield(spawning)
        except asyncio.CancelledError:
            # asyncio would kill only the supervisor, which then could not end what it has started already.
            await asyncio.shield(asyncio.create_task(cls._end_started(spawning), name="end of a program"))
            raise

    @classmethod
    async def _spawn(cls, start: ProcessStart) -> Self:
        supervisor.hide_memory()  # the server's environment and memory contain its keys, which a program could read in /proc
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        script = (sys.executable, "-IS", supervisor.__file__, str(theirs.fileno()), str(TERM_SECONDS))
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *(*script, *start.command),
                    stdin=asyncio.subprocess.PIPE if start.has_stdin else asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    cwd=start.directory,
                    env=start.environment,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    limit=start.limit,
                )
        except BaseException:
            ours.close()
            raise
        return cls(process, ours)

    @classmethod
    async def _end_started(cls, spawning: asyncio.Task[Self]) -> None:
        await asyncio.wait({spawning})
        if spawning.exception() is None:
            await spawning.result().end()

    def not_executed(self) -> str:
        """Return why the program could not be executed; empty if it was, or if that is not known yet."""
        with suppress(OSError):
            return self._connection.recv(1000).decode(errors="replace")
        return ""

    async def end(self, *tasks: asyncio.Task[object]) -> None:
        """End the process with everything that it started, then the tasks that use its pipes, and wait for both.

        Cancelling this call does not stop the work.
        """
        self._connection.close()  # tells the supervisor
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)  # the program may have stopped its supervisor
        ending = asyncio.create_task(self._finish(tasks), name=f"end of program {self.process.pid}")
        await asyncio.shield(ending)

    async def _finish(self, tasks: Sequence[asyncio.Task[object]]) -> None:
        await asyncio.wait({self.ended}, timeout=TERM_SECONDS + GRACE_SECONDS)
        if not self.ended.done():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            # asyncio also waits for the end of the pipes, which a process that the supervisor missed may hold.
            await asyncio.wait({self.ended}, timeout=GRACE_SECONDS)
        all_tasks = [self.ended, *tasks]
        await asyncio.wait(all_tasks, timeout=0.1)
        for task in all_tasks:
            task.cancel()
        await asyncio.gather(*all_tasks, return_exceptions=True)

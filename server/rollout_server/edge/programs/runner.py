"""Runs programs, each under a supervisor that ends everything it started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from rollout_server.edge.programs.supervised import GRACE_SECONDS, ProcessStart, SupervisedProcess
from rollout_server.edge.tools.process import basic_environment
from rollout_server.edge.tracing.propagation import trace_environment
from rollout_server.runtime.programs import ProgramStart, program_failed

_CHUNK = 64 * 1024
_BYTES_PER_SECOND = 32 * 1024 * 1024
"""At most so much of a program's output is read: a program that floods it waits, and not the event loop."""
_KEPT_BYTES = 64 * 1024
"""Bytes kept of the beginning, and of the end."""


class ProgramOutput:
    """Beginning and end of what a program has written; what lies between is counted and dropped."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0

    def add(self, chunk: bytes) -> None:
        """Append bytes."""
        room = _KEPT_BYTES - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        excess = max(0, len(self._tail) - _KEPT_BYTES)
        del self._tail[:excess]
        self._dropped += excess

    @property
    def text(self) -> str:
        """The output as text, with a line that says how much was dropped."""
        if not self._dropped:
            return (self._head + self._tail).decode(errors="replace")
        head, tail = self._head.decode(errors="replace"), self._tail.decode(errors="replace")
        return f"{head}\n... {self._dropped:,} bytes left out ...\n{tail}"


class ProgramProcess:
    """A running program."""

    def __init__(self, supervised: SupervisedProcess, start: ProgramStart) -> None:
        self._supervised = supervised
        self._file = start.command[0]
        self._stdout, self._stderr = ProgramOutput(), ProgramOutput()
        process, name = supervised.process, supervised.ended.get_name()
        self._readers = [
            asyncio.create_task(_read(process.stdout, self._stdout), name=f"{name} stdout"),
            asyncio.create_task(_read(process.stderr, self._stderr), name=f"{name} stderr"),
        ]
        self._writer = asyncio.create_task(_write(process.stdin, start.stdin), name=f"{name} stdin")

    @property
    def stdout(self) -> str:
        """What it has written to its standard output, at most beginning and end."""
        return self._stdout.text

    @property
    def stderr(self) -> str:
        """What it has written to its standard error, at most beginning and end."""
        return self._stderr.text

    async def wait(self) -> int:
        """Wait for its end and return its exit code, negative for a signal. Raise `RolloutFailed` if it was not executed."""
        await asyncio.wait({self._supervised.ended})
        await asyncio.wait(self._readers, timeout=GRACE_SECONDS)  # what it wrote last may still be in the pipes
        reason = self._supervised.not_executed()
        if reason:
            raise program_failed(f"the program {self._file!r:.200} could not be executed: {reason}")
        return self._supervised.ended.result()

    async def end(self) -> None:
        """End it with everything that it started, and wait for that. Cancelling this call does not stop the work."""
        await self._supervised.end(*self._readers, self._writer)


class ProgramRunner:
    """Starts the programs of a server. Lives on one event loop."""

    def __init__(self) -> None:
        self._running: set[ProgramProcess] = set()

    @property
    def running(self) -> int:
        """Number of programs that have not ended."""
        return len(self._running)

    @asynccontextmanager
    async def start(self, start: ProgramStart) -> AsyncIterator[ProgramProcess]:
        """Start a program; it has ended with everything that it started when the context is left. Raise `RolloutFailed`."""
        environment = {**basic_environment(), **trace_environment(), **start.environment}
        try:
            supervised = await SupervisedProcess.start(
                ProcessStart(start.command, start.directory, environment, bool(start.stdin), _CHUNK)
            )
        except (
            OSError,
            ValueError,
        ) as error:  # such as an argument that is too long, or one that contains a null character
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise program_failed(f"the program could not be started: {reason}") from error
        program = ProgramProcess(supervised, start)
        self._running.add(program)
        try:
            yield program
        finally:
            await self._end(program)

    async def close(self) -> None:
        """End all programs."""
        await asyncio.gather(*(self._end(program) for program in tuple(self._running)))

    async def _end(self, program: ProgramProcess) -> None:
        try:
            await program.end()
        finally:
            self._running.discard(program)


async def _read(stream: asyncio.StreamReader | None, output: ProgramOutput) -> None:
    while stream is not None and (chunk := await stream.read(_CHUNK)):
        output.add(chunk)
        await asyncio.sleep(len(chunk) / _BYTES_PER_SECOND)


async def _write(stream: asyncio.StreamWriter | None, text: str) -> None:
    if stream is None:
        return
    with suppress(OSError):  # a program may end, or close its input, before it has read everything
        stream.write(text.encode(errors="replace"))
        await stream.drain()
        stream.close()

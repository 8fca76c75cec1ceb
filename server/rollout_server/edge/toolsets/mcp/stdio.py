"""MCP servers that are programs: messages are lines of their standard input and output."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final, Self

from mcp.client._transport import TransportStreams
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from rollout_server.core.message import MAX_VALUES, has_more_values
from rollout_server.edge.programs.supervised import ProcessStart, SupervisedProcess
from rollout_server.edge.toolsets.mcp.messages import TOO_MANY_VALUES, StreamContext
from rollout_server.runtime.tools.protocols import ToolFailed

_CHUNK: Final = 64 * 1024
_BYTES_PER_SECOND: Final = 32 * 1024 * 1024
"""At most so much of a program's output is read: a program that floods it waits, and not the event loop."""
_EXIT_SECONDS: Final = 0.5
"""How long a program may take to end after its standard input was closed. Then it gets SIGTERM."""
_STDERR_BYTES: Final = 4096
_QUOTED: Final = 300
"""Characters of the standard error that an error quotes."""


class StdioServer(StreamContext):
    """A running server. Iterating over it yields its messages. `ended`: why there are no more, for people.

    Args:
        supervised: its process.
        limit: bytes of a line.
        report: is called at most once, if the process exits by itself, with how it ended and what it wrote last to its standard
            error. None: `ended` quotes that.
    """

    def __init__(
        self, supervised: SupervisedProcess, limit: int, report: Callable[[str, str], None] | None = None
    ) -> None:
        self._supervised = supervised
        self._limit = limit
        self._report = report
        self._stderr = bytearray()
        self.ended = ""
        self._reading = asyncio.create_task(self._read_stderr(), name=f"{supervised.ended.get_name()} stderr")

    async def receive(self) -> SessionMessage | Exception:
        """Return the next message. Raise StopAsyncIteration at the end."""
        return await self.__anext__()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        stdout = self._supervised.process.stdout
        assert stdout is not None  # noqa: S101 - it is a pipe
        try:
            line = await stdout.readuntil(b"\n")
        except asyncio.LimitOverrunError:
            self.ended = f"it wrote a line of more than {self._limit:,} bytes"
            raise StopAsyncIteration from None
        except (asyncio.IncompleteReadError, OSError):
            self.ended = self.ended or await self._reason()
            raise StopAsyncIteration from None
        await asyncio.sleep(len(line) / _BYTES_PER_SECOND if len(line) > _CHUNK else 0)
        if has_more_values(line, MAX_VALUES):
            self.ended = TOO_MANY_VALUES
            raise StopAsyncIteration
        try:
            return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
        except ValueError:  # programs also print other things
            return ValueError("a line that is not a message")

    async def _reason(self) -> str:
        await asyncio.wait({self._supervised.ended}, timeout=_EXIT_SECONDS)
        await asyncio.wait({self._reading}, timeout=0.1)  # what it wrote last may still be in the pipe
        not_executed = self._supervised.not_executed()
        if not_executed:
            return f"it could not be executed: {not_executed}"
        if not self._supervised.ended.done():
            return "it closed its standard output"
        code = self._supervised.ended.result()
        ending = f"it exited with status {code}" if code >= 0 else f"it was killed by signal {-code}"
        last = self._stderr.decode(errors="replace").strip()
        if not last:
            return ending
        if self._report is None:
            return f"{ending}; its standard error ends with: {last[-_QUOTED:]}"
        self._report(ending, last)
        return ending

    async def end(self) -> None:
        """End the program with everything that it started. Cancelling this call does not stop the work."""
        process = self._supervised.process
        if process.stdin is not None:
            process.stdin.close()
        draining = asyncio.create_task(self._drain(), name=f"{self._supervised.ended.get_name()} stdout")
        try:
            await asyncio.wait({self._supervised.ended}, timeout=_EXIT_SECONDS)
        finally:
            await self._supervised.end(self._reading, draining)

    async def _read_stderr(self) -> None:
        stream = self._supervised.process.stderr
        while stream is not None and (chunk := await stream.read(_CHUNK)):
            self._stderr += chunk
            del self._stderr[:-_STDERR_BYTES]
            await asyncio.sleep(len(chunk) / _BYTES_PER_SECOND)

    async def _drain(self) -> None:
        """Read the rest of its output: asyncio closes a pipe only after its end was read."""
        stream = self._supervised.process.stdout
        size = 1
        while stream is not None and size:
            size = len(await stream.read(_CHUNK))
            await asyncio.sleep(size / _BYTES_PER_SECOND)


class StdioInput(StreamContext):
    """The standard input of a server, for messages."""

    def __init__(self, stdin: asyncio.StreamWriter) -> None:
        self._stdin = stdin
        self._turn = asyncio.Lock()

    async def send(self, item: SessionMessage, /) -> None:
        """Write a message. Waits while the program reads nothing; then nothing was written."""
        line = item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
        # A program that has ended is noticed by the reader of its output.
        with suppress(OSError):
            async with self._turn:
                await self._stdin.drain()
                self._stdin.write(line)


class StdioTransport:
    """Starts a server. `report`: see `StdioServer`."""

    def __init__(self, start: ProcessStart, report: Callable[[str, str], None] | None = None) -> None:
        self._start = start
        self._report = report
        self._server: StdioServer | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[TransportStreams]:
        """Start the program; it has ended with everything that it started when the context is left. Raise `ToolFailed`."""
        try:
            supervised = await SupervisedProcess.start(self._start)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ToolFailed(f"it could not be started: {reason}", type(error).__name__) from None
        self._server = StdioServer(supervised, self._start.limit, self._report)
        try:
            assert supervised.process.stdin is not None  # noqa: S101 - it is a pipe
            yield self._server, StdioInput(supervised.process.stdin)
        finally:
            await self._server.end()

    def ended(self) -> str:
        """Return why no more messages come, for people; empty while they may come."""
        return self._server.ended if self._server is not None else ""

"""The MCP transport on standard input and output, with a limit for the length of messages."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, cast

import anyio
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

_OUT, _IN, _ERROR = 1, 0, 2


@dataclass(frozen=True, slots=True)
class StandardStreams:
    """Standard input and output for exclusive use."""

    given: IO[bytes]
    out: IO[bytes]


@contextmanager
def reserved_streams() -> Iterator[StandardStreams]:
    """Yield the standard streams.

    Whatever else this process and its children print within the block goes to standard error, and they read an empty input.
    """
    with _reserved(_IN, "rb") as given, _reserved(_OUT, "wb") as out, contextlib.redirect_stdout(sys.stderr):
        yield StandardStreams(given, out)


async def serve_stdio(server: Server[Any], streams: StandardStreams, message_bytes: int) -> None:
    """Serve one client until the input ends. Raise ValueError for a message over the limit."""
    lines = _Lines(streams.given, message_bytes)
    given, out = cast("anyio.AsyncFile[str]", lines), cast("anyio.AsyncFile[str]", _Writer(streams.out))
    async with stdio_server(given, out) as (received, sent):
        await server.run(received, sent, server.create_initialization_options())
    if lines.too_long:
        raise ValueError(f"a message has more than {message_bytes:,} bytes")


class _Lines:
    """The lines of standard input, up to its end or to one that is `too_long`.

    Reading a pipe can be cancelled, unlike a thread that waits for a line.
    """

    def __init__(self, given: IO[bytes], message_bytes: int) -> None:
        self._given = given
        self._limit = message_bytes
        self.too_long = False

    async def __aiter__(self) -> AsyncIterator[str]:
        reader = asyncio.StreamReader(self._limit)
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._given)
        except ValueError:  # a regular file, which is never waited for
            for line in self._given:
                yield line.decode("utf-8", "replace")
            return
        while True:
            try:
                line = await reader.readuntil(b"\n")
            except asyncio.IncompleteReadError as error:
                line = error.partial
            except asyncio.LimitOverrunError:
                self.too_long = True
                return
            if not line:
                return
            yield line.decode("utf-8", "replace")


class _Writer:
    """Standard output. Each message is written in a thread, because a client that does not read blocks the write."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out

    async def write(self, text: str) -> None:
        """Write one message."""
        await anyio.to_thread.run_sync(self._write, text.encode(), abandon_on_cancel=True)

    def _write(self, data: bytes) -> None:
        self._out.write(data)
        self._out.flush()

    async def flush(self) -> None:
        """Return: `write` flushes."""


@contextmanager
def _reserved(number: int, mode: str) -> Iterator[IO[bytes]]:
    """Yield a standard stream for exclusive use. Its number leads to the null device (input) or standard error (output)."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    duplicate = os.dup(number)
    instead = os.open(os.devnull, os.O_RDONLY) if number == _IN else os.dup(_ERROR)
    os.dup2(instead, number)
    os.close(instead)
    with open(duplicate, mode) as own:
        try:
            yield own
        finally:
            if not own.closed:  # a terminal is shared with the shell, which does not expect that reads do not block
                os.set_blocking(own.fileno(), True)

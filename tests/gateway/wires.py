"""A TCP connection between two parties that a test can break, or wrap in TLS."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

# More than what HTTP/2 says by itself, and less than any request for a rollout.
_PING = 100


class Wire:
    """Listens, and passes on what comes to a port of this machine and back."""

    def __init__(self, target: int, tls: ssl.SSLContext | None = None) -> None:
        self.port = 0
        self.connections = 0
        self._target = target
        self._tls = tls
        self._listener: asyncio.Server | None = None
        self._passing: set[asyncio.Task[Any]] = set()
        self._losing = False
        self._asked = 0

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    async def mend(self) -> None:
        """Listens, always on the same port."""
        self._listener = await asyncio.start_server(self._connected, "127.0.0.1", self.port, ssl=self._tls)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """Breaks all connections and takes no others."""
        if self._listener is not None:
            self._listener.close()
        for task in self._passing:
            task.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)

    def lose_an_answer(self) -> None:
        """Passes on what is asked next, and breaks the connection on which it is answered instead of passing the answer on."""
        self._losing, self._asked = True, 0

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target)
        both = [
            asyncio.create_task(self._pass(reader, there_writer, asked=True)),
            asyncio.create_task(self._pass(there_reader, writer, asked=False)),
        ]
        self._passing.update(both)
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for task in both:
            task.cancel()
            self._passing.discard(task)
        for end in (writer, there_writer):
            end.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, asked: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if asked:
                    self._asked += len(data)
                elif self._losing and self._asked > _PING:
                    self._losing = False
                    return
                writer.write(data)
                await writer.drain()


@asynccontextmanager
async def wire(target: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[Wire]:
    """A wire that is whole."""
    made = Wire(target, tls)
    await made.mend()
    try:
        yield made
    finally:
        await made.cut()

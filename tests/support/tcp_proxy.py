"""A TCP proxy that breaks connections: after a number of bytes from the server, or when a test requests it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import Iterable
from typing import Self

# More bytes than HTTP/2 sends by itself, and fewer than any start request.
_PING = 100


class TcpProxy:
    """Forward connections to a port. A connection with a budget is cut after that many bytes from the server.

    Args:
        port: of the server, on this machine.
        budgets: bytes of the first connections; later ones are not limited.
        tls: the context for clients.
    """

    def __init__(self, port: int, budgets: Iterable[int] = (), tls: ssl.SSLContext | None = None) -> None:
        self.connections = 0
        self.forwarded = 0
        self._to = port
        self._budgets = deque(budgets)
        self._tls = tls
        # Bytes from clients since `lose_an_answer`; None if no response is to be lost.
        self._asked: int | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def __aenter__(self) -> Self:
        await self.mend()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.down()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def address(self) -> str:
        """The address of the proxy."""
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Cut all connections on both sides. New ones are still accepted."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def forward(self, port: int) -> None:
        """Forward new connections to another server, as after a restart."""
        self._to = port

    async def down(self) -> None:
        """Cut all connections and refuse new ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()

    async def mend(self) -> None:
        """Accept connections (again)."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    def lose_an_answer(self) -> None:
        """Forward the next request, and break its connection instead of forwarding the response."""
        self._asked = 0

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        budget = self._budgets.popleft() if self._budgets else None
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
        except ConnectionError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        for pump in (self._there(reader, far_writer), self._back(far_reader, writer, far_writer, budget)):
            task = asyncio.create_task(pump, name="proxy")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _there(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65536):
                if self._asked is not None:
                    self._asked += len(piece)
                writer.write(piece)
                await writer.drain()
        writer.close()

    async def _back(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        far_writer: asyncio.StreamWriter,
        budget: int | None,
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65536 if budget is None else budget):
                # Bytes from the server may be pings or settings until a whole request has passed.
                if self._asked is not None and self._asked > _PING:
                    self._asked = None
                    far_writer.transport.abort()
                    writer.transport.abort()
                    return
                self.forwarded += len(piece)
                writer.write(piece)
                await writer.drain()
                if budget is not None:
                    budget -= len(piece)
                    if budget <= 0:
                        far_writer.transport.abort()
                        break
        writer.close()

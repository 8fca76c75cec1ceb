"""A line to a server that breaks: after so many bytes of the server's, or when a test says so. Real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable
from typing import Self


class Line:
    """Forwards connections to a port. Each lets through as many of the server's bytes as its budget says, then it is cut.

    Args:
        port: of the server, on this machine.
        budgets: of the first connections; those after them let everything through.
    """

    def __init__(self, port: int, budgets: Iterable[int] = ()) -> None:
        self.connections = 0
        self.forwarded = 0
        self._to = port
        self._budgets = deque(budgets)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._port = 0

    async def __aenter__(self) -> Self:
        await self.mend()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.down()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def address(self) -> str:
        """Where clients connect."""
        return f"127.0.0.1:{self._port}"

    def cut(self) -> None:
        """Cuts all connections, on both sides; others may follow."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def forward(self, port: int) -> None:
        """Leads to another server, as after a restart."""
        self._to = port

    async def down(self) -> None:
        """Cuts, and refuses connections from then on."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()

    async def mend(self) -> None:
        """Takes connections (again)."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

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
            task = asyncio.create_task(pump, name="line")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _there(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65536):
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
                self.forwarded += len(piece)
                writer.write(piece)
                await writer.drain()
                if budget is not None:
                    budget -= len(piece)
                    if budget <= 0:
                        far_writer.transport.abort()
                        break
        writer.close()

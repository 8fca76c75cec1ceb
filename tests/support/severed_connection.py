"""A proxy to a gRPC server that resets the connection at one message: before the message passes, or right after it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Self

# RFC 9113: the client's preface (3.4); a frame's header has its length (3 bytes), type (1), flags (1) and stream (4) (4.1).
_PREFACE = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
_HEADER = 9
_DATA = 0


@dataclass(frozen=True)
class Cut:
    """The message to cut at: the n-th to or from the server, counted from 1. With `passes`, it is still delivered."""

    to_server: bool
    number: int
    passes: bool


class SeveredLine:
    """Forward connections to a port, and cut the first one that reaches the message. `was_cut` is set then."""

    def __init__(self, port: int, cut: Cut) -> None:
        self.was_cut = False
        self.connections = 0
        self._to = port
        self._cut = cut
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def address(self) -> str:
        """The address of the proxy."""
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
        both = (writer, far_writer)
        for to_server, source, sink in ((True, reader, far_writer), (False, far_reader, writer)):
            task = asyncio.create_task(self._forward(to_server, source, sink, both))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(
        self,
        to_server: bool,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        both: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
    ) -> None:
        messages = 0
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            if to_server:
                sink.write(await source.readexactly(_PREFACE))
            while True:
                header = await source.readexactly(_HEADER)
                frame = header + await source.readexactly(int.from_bytes(header[:3], "big"))
                # A gRPC message of these tests fits into one DATA frame; empty ones only end a stream.
                messages += header[3] == _DATA and len(frame) > _HEADER
                severs = not self.was_cut and self._cut.to_server is to_server and messages == self._cut.number
                if not severs or self._cut.passes:
                    sink.write(frame)
                    await sink.drain()
                if severs:
                    self.was_cut = True
                    if self._cut.passes:
                        await asyncio.sleep(0.005)  # so that the reset does not overtake the message
                    for writer in both:
                        writer.transport.abort()
                    return
        sink.close()

"""A trainer on a plain socket: a test controls each byte it sends, and when it breaks the connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

COMPLETION = json.dumps(
    {
        "choices": [{"message": {"role": "assistant", "content": "8"}, "finish_reason": "stop"}],
        "token_ids": [5, 6],
        "logprobs": [-0.5, -0.25],
    }
).encode()
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER on, for 0 seconds: close() sends a TCP reset


@dataclass(frozen=True)
class Request:
    """A complete request: target, headers (names in lower case), body, and the number of its connection."""

    target: str
    headers: Mapping[str, str]
    body: bytes
    connection: int


Act: TypeAlias = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""The reaction to one request."""


@dataclass
class HttpTrainer:
    """React to the k-th request with the k-th of `acts`; the last one repeats."""

    acts: tuple[Act, ...]
    requests: list[Request] = field(default_factory=list)
    url: str = ""
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)
    _serving: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def connections(self) -> int:
        """Number of connections so far."""
        return len(self._writers)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        self._writers.append(writer)
        connection = len(self._writers)
        if task := asyncio.current_task():
            self._serving.append(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                self.requests.append(await read_request(reader, connection))
                await self.acts[min(len(self.requests), len(self.acts)) - 1](reader, writer)
        writer.close()

    async def left(self) -> None:
        """Wait until all callers have closed their connections."""
        await asyncio.gather(*self._serving)

    async def end(self) -> None:
        """Break all connections."""
        for writer in self._writers:
            writer.transport.abort()
        await self.left()


async def read_request(reader: asyncio.StreamReader, connection: int = 1) -> Request:
    """Read one request with a Content-Length. Raises IncompleteReadError at the end of the connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.rstrip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(first.split(" ")[1], headers, body, connection)


@contextlib.asynccontextmanager
async def raw_trainer(*acts: Act, listener: socket.socket | None = None) -> AsyncIterator[HttpTrainer]:
    """Serve on a free port, or on a socket that is already bound."""
    trainer = HttpTrainer(acts or (answer(),))
    bound = listener or socket.create_server(("127.0.0.1", 0))
    server = await asyncio.start_server(trainer.serve, sock=bound, limit=2**26, backlog=1024)
    trainer.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    try:
        yield trainer
    finally:
        server.close()
        await trainer.end()


def head(status: int, length: int, headers: Mapping[str, str] | None = None) -> bytes:
    """The head of a response."""
    lines = [f"HTTP/1.1 {status} Whatever", f"content-length: {length}", "content-type: application/json"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode()


def answer(body: bytes = COMPLETION, status: int = 200, **headers: str) -> Act:
    """Send a complete response. `retry_after` sets the header Retry-After."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    async def act(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head(status, len(body), named) + body)
        await writer.drain()

    return act


def reset(after: bytes = b"") -> Act:
    """Send the bytes `after`, then reset the TCP connection."""

    async def act(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if after:
            writer.write(after)
            await writer.drain()
            await asyncio.sleep(0.1)  # a reset discards bytes that the other side has not read yet
        connection = writer.get_extra_info("socket")
        # A duplicate shares the socket's options. Event loops differ in which operations they allow on their own sockets.
        with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
            duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
        writer.transport.abort()

    return act


def closed(after: bytes = b"") -> Act:
    """Send some bytes, then close the connection in order."""

    async def act(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(after)
        await writer.drain()
        writer.close()

    return act


def silence() -> Act:
    """Send no response for as long as the caller stays connected."""

    async def act(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    return act


def endless(piece: bytes, seconds: float = 0.0) -> Act:
    """Send an endless body, in pieces with a pause between them."""

    async def act(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head(200, 2**40))
        while not writer.is_closing():
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(seconds)

    return act

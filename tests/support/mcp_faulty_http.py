"""An MCP server over HTTP that speaks the protocol by itself and breaks its rules at `tools/call`."""

from __future__ import annotations

import asyncio
import gzip
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.mcp_faulty import TEXT, TOOL
from tests.support.rogue_http import read_request, serve_exchanges

_SSE = "content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
_JSON = "content-type: application/json\r\n"
_RAW = {
    "html": "HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 6\r\n\r\nsecret",
    "status": "HTTP/1.1 500 Oops\r\ncontent-length: 6\r\n\r\nsecret",
    "unauthorized": "HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n",
    "forgot session": "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
    "redirect": "HTTP/1.1 307 Moved\r\nlocation: http://169.254.169.254/latest\r\ncontent-length: 0\r\n\r\n",
    "not json": f"HTTP/1.1 200 OK\r\n{_JSON}content-length: 6\r\n\r\nsecret",
    "cut body": f"HTTP/1.1 200 OK\r\n{_JSON}content-length: 1000\r\n\r\n{{",
    "accepted": "HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n",
    "no http": "220 mail.example ready\r\n",
    "empty stream": f"HTTP/1.1 200 OK\r\n{_SSE}\r\n0\r\n\r\n",
}
_FLOODS = {
    "flood body": (f"HTTP/1.1 200 OK\r\n{_JSON}transfer-encoding: chunked\r\n\r\n", b"x" * 65536),
    "flood events": (
        f"HTTP/1.1 200 OK\r\n{_SSE}\r\n",
        b'data: {"jsonrpc":"2.0","method":"notifications/message"}\n\n' * 1000,
    ),
    "flood comments": (f"HTTP/1.1 200 OK\r\n{_SSE}\r\n", b": ping\n" * 10_000),
    "flood event": (f"HTTP/1.1 200 OK\r\n{_SSE}\r\n", b"data: x\n" * 10_000),
    "flood ids": (f"HTTP/1.1 200 OK\r\n{_SSE}\r\n", b"id: 1\ndata:\n\n" * 10_000),
    "flood headers": ("HTTP/1.1 200 OK\r\n", b"x-more: header\r\n" * 1000),
    "flood 1xx": ("", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
}


class FaultyMcp:
    """A running server. `fault` may be changed between calls; "" is none. `seen`: the messages and their headers."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.port = 0
        self.seen: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.released = asyncio.Event()

    @property
    def url(self) -> str:
        """The address of the server."""
        return f"http://127.0.0.1:{self.port}/mcp"

    def methods(self) -> list[str]:
        """The methods of the messages so far."""
        return [message.get("method", "") for message, _ in self.seen]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        await serve_exchanges(reader, writer, self._exchange)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        _, headers, message = await read_request(reader)
        self.seen.append((message, headers))
        if message.get("method") == "tools/call" and self.fault == "late":
            await self.released.wait()
        elif message.get("method") == "tools/call" and self.fault:
            return await self._break(reader, writer)
        writer.write(_response(message))
        await writer.drain()
        return True

    async def _break(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if self.fault in _FLOODS:
            start, piece = _FLOODS[self.fault]
            writer.write(start.encode())
            chunked = "chunked" in start
            while True:
                writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" if chunked else piece)
                await writer.drain()
        if self.fault == "hang":
            await reader.read()
        elif self.fault == "bomb":
            packed = gzip.compress(b" " * 100_000_000)
            head = f"HTTP/1.1 200 OK\r\n{_JSON}content-encoding: gzip\r\ncontent-length: {len(packed)}\r\n\r\n"
            writer.write(head.encode() + packed)
            await writer.drain()
        elif self.fault in _RAW:
            writer.write(_RAW[self.fault].encode())
            await writer.drain()
        return False  # closes the connection; "reset" does nothing else


def _response(message: dict[str, Any]) -> bytes:
    about = {"serverInfo": {"name": "faulty", "version": "1"}, "capabilities": {"tools": {}}}
    results = {
        "initialize": {"protocolVersion": "2025-11-25", **about},
        "tools/list": {"tools": [TOOL]},
        "tools/call": TEXT,
    }
    if "id" not in message:
        return b"HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n"
    result = results.get(message["method"])
    outcome = {"result": result} if result else {"error": {"code": -32601, "message": "Method not found"}}
    body = json.dumps({"jsonrpc": "2.0", "id": message["id"], **outcome})
    return f"HTTP/1.1 200 OK\r\n{_JSON}mcp-session-id: one\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


@asynccontextmanager
async def faulty_mcp(fault: str, tls: ssl.SSLContext | None = None, port: int = 0) -> AsyncIterator[FaultyMcp]:
    """Serve on a port of this machine; 0: on a free one."""
    faulty = FaultyMcp(fault)
    server = await asyncio.start_server(faulty.serve, "127.0.0.1", port, ssl=tls)
    faulty.port = server.sockets[0].getsockname()[1]
    try:
        yield faulty
    finally:
        server.close()

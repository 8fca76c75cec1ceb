"""A client that writes HTTP/2 frames by hand, for frames that gRPC's own client never sends."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

SERVICE = "/osmosis.rollout.v1.RolloutService"
DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4
END_STREAM, END_HEADERS = 1, 4
CANCEL = b"\0\0\0\x08"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def headers(rpc: str, *extra: tuple[bytes, bytes]) -> bytes:
    """The header block that opens a call: POST over http, then literals without indexing."""
    fields = [
        (b":path", f"{SERVICE}/{rpc}".encode()),
        (b":authority", b"x"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
        *extra,
    ]
    return b"\x83\x86" + b"".join(
        b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value for name, value in fields
    )


def message(payload: bytes, *, compressed: bool = False) -> Sequence[bytes]:
    """A gRPC message, split into frames."""
    whole = struct.pack(">BI", compressed, len(payload)) + payload
    return [whole[at : at + 16_384] for at in range(0, len(whole), 16_384)]


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection on which the settings frame was sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_PREFACE + frame(SETTINGS, 0, 0))
        yield reader, writer
    finally:
        writer.close()


async def frames(reader: asyncio.StreamReader) -> AsyncIterator[tuple[int, int, int, bytes]]:
    """Frames from the server: type, flags, stream, payload."""
    while head := await reader.read(9):
        head += await reader.readexactly(9 - len(head))
        payload = await reader.readexactly(int.from_bytes(head[:3]))
        yield head[3], head[4], int.from_bytes(head[5:9]), payload

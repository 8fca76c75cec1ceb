"""The protocol between server and tool process: JSON values with a length prefix. Nothing is unpickled.

A tool's code may write anything to this connection, so the server treats every frame as untrusted.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Mapping

from rollout_server.core.message import JSON, parse_object

LARGEST = 32 * 1024 * 1024
"""Maximum size of a frame in bytes."""

_LENGTH = struct.Struct(">I")
_ASIDE = 256 * 1024  # bytes of a frame from which it is parsed in a thread


class BadFrame(Exception):
    """The received bytes are not a valid frame."""


def framed(value: Mapping[str, object]) -> bytes:
    """Return the frame of a value. Raise ValueError if it is too large."""
    body = json.dumps(value, allow_nan=False).encode("ascii")
    if len(body) > LARGEST:
        raise ValueError(f"it has {len(body):,} bytes, at most {LARGEST:,} can be sent")
    return _LENGTH.pack(len(body)) + body


async def read(reader: asyncio.StreamReader) -> Mapping[str, JSON]:
    """Read the next value. Raise `BadFrame`, and EOFError if the connection ends."""
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > LARGEST:
        raise BadFrame
    body = await reader.readexactly(size)
    try:
        text = body.decode("ascii")
        return parse_object(text) if size < _ASIDE else await asyncio.to_thread(parse_object, text)
    except ValueError:
        raise BadFrame from None


def read_blocking(connection: socket.socket) -> Mapping[str, JSON]:
    """Read the next value in a tool process, which trusts the server. Raise EOFError."""
    (size,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    value: Mapping[str, JSON] = json.loads(_exactly(connection, size))
    return value


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 65536))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)

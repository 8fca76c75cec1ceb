"""What server and tool process say to each other: JSON values, each behind its length. Nothing is ever unpickled.

A tool's code may write to this connection whatever it likes, so the server takes every frame for a stranger's.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Mapping

from rollout_server.core.message import JSON, parse_object

LARGEST = 32 * 1024 * 1024
"""Bytes of one frame."""

_LENGTH = struct.Struct(">I")
_ASIDE = 256 * 1024


class BadFrame(Exception):
    """What came is no frame."""


def framed(value: Mapping[str, object]) -> bytes:
    """The frame of a value. Raises ValueError for one that is too large."""
    body = json.dumps(value, allow_nan=False).encode("ascii")
    if len(body) > LARGEST:
        raise ValueError(f"{len(body):,} bytes, where at most {LARGEST:,} can be sent")
    return _LENGTH.pack(len(body)) + body


async def read(reader: asyncio.StreamReader) -> Mapping[str, JSON]:
    """The next value. Raises `BadFrame`, and EOFError where the connection ends."""
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
    """The same in a process of tools, which trusts its server. Raises EOFError."""
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

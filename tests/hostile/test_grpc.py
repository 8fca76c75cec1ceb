"""Malicious gRPC clients: upper bounds for the cost of a message, a call and a connection."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from osmosis.rollout.v1 import message_pb2, spec_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub
from rollout_server.core.message import MAX_VALUES
from rollout_server.edge.api_keys import entry_of
from rollout_server.edge.rpc.field_count import MAX_FIELDS, TooManyFields, check_fields
from rollout_server.edge.wire.message import MAX_VIOLATIONS

from tests.edge.rpc.conftest import OpenServer, open_server  # noqa: F401 - a fixture
from tests.hostile import h2
from tests.support.processes import Serving, serve
from tests.support.server_client import Caller, refusal, serving
from tests.support.start_requests import json_message, start

KEY = "key-of-alice-0123"
START = pb.StartRolloutRequest.DESCRIPTOR
MIB = 2**20


def varint(number: int) -> bytes:
    """A number in protobuf's varint encoding."""
    out = b""
    while number > 127:
        out, number = out + bytes((number & 127 | 128,)), number >> 7
    return out + bytes((number,))


def field(message: Any, name: str, payload: bytes) -> bytes:
    """A length-delimited field, with bytes or a message."""
    return varint(message.DESCRIPTOR.fields_by_name[name].number << 3 | 2) + varint(len(payload)) + payload


def many_messages(count: int) -> bytes:
    """A start request whose spec has this many empty messages of two bytes each."""
    return field(pb.StartRolloutRequest, "spec", field(spec_pb2.RolloutSpec, "messages", b"") * count)


def peak(serving: Serving) -> int:
    """The maximum memory of a server so far, in bytes."""
    status = Path(f"/proc/{serving.process.pid}/status").read_text()
    return next(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


class Watched(bytes):
    """Bytes that count how often one of them is read."""

    looked = 0

    def __getitem__(self, key: Any) -> Any:
        self.looked += 1
        return super().__getitem__(key)


def test_counting_stops_at_the_limit() -> None:
    payload = Watched(many_messages(2_000_000))
    with pytest.raises(TooManyFields):
        check_fields(payload, START)
    assert payload.looked < 3 * MAX_FIELDS


def test_what_is_skipped_is_not_looked_at() -> None:
    payload = Watched(start(metadata_json=" " * 1_000_000).SerializeToString())
    check_fields(payload, START)
    assert payload.looked < 1000


@pytest.mark.parametrize("size", range(12))
def test_what_is_cut_off_is_no_message(size: int) -> None:
    whole = start(messages=[message_pb2.Message(chat=message_pb2.ChatMessage(role="user"))]).SerializeToString()
    check_fields(whole, START)
    with pytest.raises(DecodeError):
        check_fields(whole[: -1 - size], START)


@pytest.mark.parametrize(
    "payload",
    [b"\xff" * 11, b"\x0b", b"\x0c", b"\x0e", b"\x0f", b"\x12\x05\x0a\x09ab", b"\x09ab", b"\x0dab"],
    ids=[
        "endless",
        "group",
        "end of group",
        "type 6",
        "type 7",
        "inner beyond outer",
        "short fixed64",
        "short fixed32",
    ],
)
def test_what_the_wire_does_not_know_is_no_message(payload: bytes) -> None:
    with pytest.raises(DecodeError):
        check_fields(payload, START)


def test_fields_of_later_versions_are_counted_and_let_through() -> None:
    later = varint(9000 << 3) + b"\x05" + varint(9001 << 3 | 2) + b"\x02ab" + varint(9002 << 3 | 1) + bytes(8)
    check_fields(later + varint(9003 << 3 | 5) + bytes(4), START)
    with pytest.raises(TooManyFields):
        check_fields((varint(9000 << 3) + b"\x05") * (MAX_FIELDS + 1), START)


async def test_millions_of_empty_messages_cost_little_compressed_or_not(tmp_path: Path) -> None:
    payload = many_messages(8_000_000)
    squeezed = zlib.compress(payload, 9, wbits=31)
    assert len(squeezed) < 20_000
    async with serve(cwd=tmp_path) as serving:
        before = peak(serving)
        async with grpc.aio.insecure_channel(
            f"127.0.0.1:{serving.grpc_port}", options=[("grpc.max_send_message_length", -1)]
        ) as channel:
            refused = await refusal(channel.unary_unary(f"{h2.SERVICE}/StartRollout")(payload))
            assert (refused.code, [*refused.fields]) == (grpc.StatusCode.INVALID_ARGUMENT, ["request"])
        async with h2.connected(serving.grpc_port) as (reader, writer):
            opening = h2.headers("StartRollout", (b"grpc-encoding", b"gzip"))
            writer.write(h2.frame(h2.HEADERS, h2.END_HEADERS, 1, opening))
            pieces = h2.message(squeezed, compressed=True)
            for number, piece in enumerate(pieces, start=1):
                writer.write(h2.frame(h2.DATA, h2.END_STREAM if number == len(pieces) else 0, 1, piece))
            assert await _status(reader) == str(grpc.StatusCode.INVALID_ARGUMENT.value[0]).encode()
        assert peak(serving) - before < 200 * MIB


@pytest.mark.parametrize("rpc", ["StartRollout", "RunRollout"])
async def test_large_requests_that_are_refused_leave_nothing_behind(tmp_path: Path, rpc: str) -> None:
    message = json_message('{"role":"user","content":"' + "x" * 7 * MIB + '"}')
    request = start(messages=[message] * 2, agent="nobody")
    whole = pb.RunRolloutRequest(start=request) if rpc == "RunRollout" else request
    async with serve(cwd=tmp_path) as serving:
        before = peak(serving)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}") as channel:
            stub = RolloutServiceStub(channel)
            for _ in range(40):
                call = getattr(stub, rpc)(whole)
                refused = await refusal(call.read() if rpc == "RunRollout" else call)
                assert refused.code is grpc.StatusCode.NOT_FOUND
        assert peak(serving) - before < 400 * MIB


async def test_opening_and_resetting_streams_in_a_row_holds_little(tmp_path: Path) -> None:
    opening = h2.headers("GetServerInfo")
    async with serve(cwd=tmp_path) as serving:
        before = peak(serving)
        for _ in range(3):
            async with h2.connected(serving.grpc_port) as (reader, writer):
                reading = asyncio.create_task(_read_all(reader))
                with suppress(ConnectionError):
                    for first in range(1, 200_000, 2000):
                        streams = range(first, first + 2000, 2)
                        writer.write(b"".join(_opened_and_reset(stream, opening) for stream in streams))
                        await writer.drain()
                reading.cancel()
        assert peak(serving) - before < 500 * MIB
        async with grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}") as channel:
            info = channel.unary_unary(
                f"{h2.SERVICE}/GetServerInfo", response_deserializer=pb.GetServerInfoResponse.FromString
            )
            assert (await info(b"")).running == 0


async def test_a_call_without_a_key_is_refused_before_its_message_comes() -> None:
    async with serving(api_keys=(entry_of("alice", KEY),)) as caller:
        for rpc in ("StartRollout", "RunRollout", "GetRollout"):
            async with h2.connected(caller.server.grpc_port) as (reader, writer):
                writer.write(h2.frame(h2.HEADERS, h2.END_HEADERS, 1, h2.headers(rpc)))
                assert await _status(reader) == str(grpc.StatusCode.UNAUTHENTICATED.value[0]).encode()


@pytest.mark.parametrize("keys", [(KEY, KEY), (KEY, "wrong"), ("wrong", KEY), ("", KEY), (KEY, "", KEY)])
async def test_two_keys_are_refused(keys: Sequence[str]) -> None:
    metadata = [("authorization", f"Bearer {key}") for key in keys]
    async with serving(api_keys=(entry_of("alice", KEY),)) as caller:
        for call in (
            caller.stub.ListRollouts(pb.ListRolloutsRequest(), metadata=metadata),
            caller.stub.RunRollout(pb.RunRolloutRequest(start=start()), metadata=metadata).read(),
        ):
            refused = await refusal(call)
            assert (refused.code, refused.reason) == (grpc.StatusCode.UNAUTHENTICATED, "KEY_AMBIGUOUS")
            assert KEY not in refused.text
        await caller.stub.ListRollouts(
            pb.ListRolloutsRequest(), metadata=metadata[:1] if keys[0] == KEY else metadata[1:2]
        )


async def test_what_is_wrong_is_told_up_to_a_number(open_server: OpenServer) -> None:  # noqa: F811
    caller: Caller = await open_server()
    refused = await refusal(caller.stub.StartRollout(start(messages=[message_pb2.Message()] * 40_000)))
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert [*refused.fields] == [f"spec.messages[{index}]" for index in range(MAX_VIOLATIONS)]


@pytest.mark.parametrize("value", ["1", "{}", "[]", '{"a":null}', "[[1]]"])
async def test_values_of_messages_are_limited_together(open_server: OpenServer, value: str) -> None:  # noqa: F811
    caller: Caller = await open_server()
    half = '{"role":"user","content":"","x":[' + ",".join([value] * (MAX_VALUES // 2)) + "]}"
    refused = await refusal(caller.stub.StartRollout(start(messages=[json_message(half)] * 3)))
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"have more than {MAX_VALUES} JSON values in total" in refused.text
    whole = '{"x":[' + ",".join([value] * MAX_VALUES) + "]}"
    refused = await refusal(caller.stub.StartRollout(start(metadata_json=whole)))
    assert [*refused.fields] == ["spec.metadata_json"]


async def test_marks_within_texts_are_not_taken_for_values(open_server: OpenServer) -> None:  # noqa: F811
    caller: Caller = await open_server()
    prose = json_message('{"role":"user","content":"' + 'a, \\" [b] {c}, ' * MAX_VALUES + '"}')
    await caller.start(start(messages=[prose]))
    paragraph = json_message('{"role":"user","content":"' + "a, [b] " * 50 + '"}')
    await caller.start(start(messages=[paragraph] * (MAX_VALUES // 50)))


def _opened_and_reset(stream: int, opening: bytes) -> bytes:
    return h2.frame(h2.HEADERS, h2.END_HEADERS, stream, opening) + h2.frame(h2.RST_STREAM, 0, stream, h2.CANCEL)


async def _read_all(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        while await reader.read(MIB):
            pass


async def _status(reader: asyncio.StreamReader) -> bytes:
    """The status of the call on stream 1, whose header names and values are sent as literals."""
    async with asyncio.timeout(60):
        async for kind, _, stream, payload in h2.frames(reader):
            if (kind, stream) == (h2.HEADERS, 1) and b"grpc-status" in payload:
                rest = payload.partition(b"grpc-status")[2]
                return rest[1 : 1 + rest[0]]
    raise AssertionError("the connection ended without a status")

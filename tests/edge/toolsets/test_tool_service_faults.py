"""Tool servers that are killed, hang, flood or send what they must not: each is a failure of one call."""

from __future__ import annotations

import asyncio
import os

import grpc
import pytest
from osmosis.rollout.v1 import message_pb2
from osmosis.rollout.v1 import tool_service_pb2 as pb
from rollout_server.edge.toolsets.tool_service import ToolServiceTimes
from rollout_server.edge.wire.toolset import LISTING_BYTES, RESULT_BYTES
from rollout_server.runtime.tools.protocols import ToolFailed
from rollout_server.runtime.tools.toolset import ToolsetCaller

from tests.support.grpc_trainer import Fault
from tests.support.tcp_proxy import TcpProxy
from tests.support.tool_service import LONG_METADATA, CounterService, RawService, call, connector, serving, source

CALLER = ToolsetCaller("u1")
SHORT = ToolServiceTimes(connect=0.3, listing=0.4, call=0.4, unavailable=0.3, first=0.005, most=0.02)


def parts(*given: message_pb2.ContentPart) -> bytes:
    return pb.CallToolResponse(output=pb.ToolOutput(parts=given)).SerializeToString()


def json_part(text: str) -> bytes:
    return parts(message_pb2.ContentPart(json=text))


def blob(**fields: object) -> bytes:
    return parts(message_pb2.ContentPart(blob=message_pb2.Blob(**fields)))  # type: ignore[arg-type]


def field(number: int, data: bytes) -> bytes:
    """One encoded field of the type bytes, of at most 127 bytes."""
    return bytes([number << 3 | 2, len(data)]) + data


MALFORMED = {
    "nothing": (b"", "neither `output` nor `error`"),
    "no_protobuf": (b"\xff" * 40, "not a valid CallToolResponse"),
    "a_wrong_type": (b"\x08\x01", "neither"),
    "bad_utf8": (field(1, field(1, field(1, b"\xff\xfe"))), "not a valid CallToolResponse"),
    "an_error_of_bad_utf8": (field(2, field(1, b"\xc3\x28")), "not a valid CallToolResponse"),
    "a_part_of_nothing": (parts(message_pb2.ContentPart(text="a"), message_pb2.ContentPart()), r"parts\[1\]: needs"),
    "too_large": (parts(message_pb2.ContentPart(text="x" * RESULT_BYTES)), f"at most {RESULT_BYTES} are read"),
    "many_parts": (parts(*[message_pb2.ContentPart()] * 100_000), "fields, the maximum"),
    "json_list": (json_part("[]"), "a JSON object is needed"),
    "json_untyped": (json_part("{}"), "a string under `type`"),
    "json_wrong_text": (json_part('{"type": "text", "text": 5}'), "`text` must be a string"),
    "json_infinite": (json_part('{"type": "text", "text": "", "n": 1e999}'), "cannot be part of a message"),
    "json_nan": (json_part('{"type": "text", "text": "", "n": NaN}'), r"parts\[0\]"),
    "json_deep": (json_part('{"type": "x", "n": ' + "[" * 5000 + "]" * 5000 + "}"), "levels deep"),
    "json_values": (json_part('{"type": "x", "n": [' + "0," * 100_000 + "0]}"), "values, the maximum"),
    "blob_without_type": (blob(inline=b"x"), "not a media type"),
    "blob_with_a_header": (blob(media_type="image/png;base64,x\r\n", inline=b"x"), "not a media type"),
    "blob_without_source": (blob(media_type="image/png"), "needs `inline` or `uri`"),
    "blob_of_a_file": (blob(media_type="image/png", uri="file:///etc/passwd"), "not a data:, http: or https: URI"),
}


@pytest.mark.parametrize(("data", "said"), MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_malformed_result_is_a_failure(data: bytes, said: str) -> None:
    async with serving(RawService(data)) as url, connector() as to, to.connect(source(url), CALLER) as session:
        with pytest.raises(ToolFailed, match=said) as failed:
            await session.call(call("add", "k1"))
        assert url in str(failed.value)
        assert len(str(failed.value)) < 500


LISTS = {
    "no_protobuf": (b"\xff" * 40, "not a valid DescribeToolsResponse"),
    "bad_utf8": (field(1, field(1, b"\xff")), "not a valid DescribeToolsResponse"),
    "too_large": (b"\x12\x00" * (LISTING_BYTES // 2 + 1), f"at most {LISTING_BYTES} are read"),
    "many_names": (b"\x12\x00" * 100_000, "fields, the maximum"),
}


@pytest.mark.parametrize(("data", "said"), LISTS.values(), ids=LISTS.keys())
async def test_a_malformed_list_is_a_failure(data: bytes, said: str) -> None:
    async with serving(RawService(data)) as url, connector() as to, to.connect(source(url), CALLER) as session:
        with pytest.raises(ToolFailed, match=said):
            await session.list_tools()


async def test_a_flood_is_a_failure_and_is_not_requested_again() -> None:
    flood = pb.CallToolResponse(output=pb.ToolOutput(parts=[message_pb2.ContentPart(text="x" * 2**26)]))
    service = CounterService(replies={"flood": [flood]})
    async with serving(service) as url, connector() as to, to.connect(source(url), CALLER) as session:
        with pytest.raises(ToolFailed, match="Answers of up to 33554432 bytes are accepted"):
            await session.call(call("flood", "k1"))
        assert await session.call(call("add", "k2", amount=1)) == "1"
    assert [sent.call_key for sent in service.calls] == ["k1", "k2"]


async def test_an_error_that_is_too_long_is_a_failure_and_is_not_requested_again() -> None:
    service = CounterService(faults=[Fault(grpc.StatusCode.INTERNAL, "x" * 20_000)])
    async with serving(service) as url, connector() as to, to.connect(source(url), CALLER) as session:
        with pytest.raises(ToolFailed, match="metadata size exceeds") as failed:
            await session.call(call("add", "k1"))
        assert len(str(failed.value)) < 1000
    assert len(service.calls) == 1


async def test_a_server_that_hangs_is_given_up_after_the_overall_time() -> None:
    service = CounterService()
    async with serving(service) as url, connector(SHORT) as to, to.connect(source(url), CALLER) as session:
        with pytest.raises(ToolFailed, match="DEADLINE_EXCEEDED"):
            await session.call(call("hang", "k1"))
        await service.cancelled.wait()


async def test_a_server_that_accepts_and_says_nothing_is_given_up() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with connector(SHORT) as to, to.connect(source(f"grpc://127.0.0.1:{port}"), CALLER) as session:
        with pytest.raises(ToolFailed, match="DescribeTools: could not be reached"):
            await session.list_tools()
    server.close()
    await server.wait_closed()


async def test_a_server_that_is_not_there_is_a_failure() -> None:
    async with serving(CounterService()) as url:
        pass
    async with connector(SHORT) as to, to.connect(source(url), CALLER) as session:
        with pytest.raises(ToolFailed, match=r"could not be reached: .*attempts\)$"):
            await session.list_tools()


async def test_a_server_that_is_killed_during_a_call_is_found_again() -> None:
    first, second = CounterService(), CounterService(replies={"hang": []})
    async with connector() as to:
        async with serving(first) as url, to.connect(source(url), CALLER) as session:
            assert await session.call(call("add", "k1", amount=1)) == "1"
            pending = asyncio.create_task(session.call(call("add", "k2", amount=1)))
            held = asyncio.create_task(session.call(call("hang", "k3")))
            await first.began.wait()
            assert await pending == "2"
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        again = asyncio.create_task(session.call(call("add", "k4", amount=5)))
        await asyncio.sleep(0.05)  # some attempts find nobody
        async with serving(second, int(url.rpartition(":")[2])):
            assert await again == "5"
            assert [tool.name for tool in await session.list_tools()] == ["add", "hang"]


async def test_a_call_whose_connection_breaks_runs_once() -> None:
    service = CounterService()
    caller = ToolsetCaller("u1", LONG_METADATA)
    async with (
        serving(service) as url,
        TcpProxy(int(url.rpartition(":")[2])) as proxy,
        connector() as to,
        to.connect(source(f"grpc://{proxy.address}"), caller) as session,
    ):
        await session.list_tools()
        for index in range(5):
            proxy.lose_an_answer()
            assert await session.call(call("add", f"k{index}", amount=1)) == str(index + 1)
    assert service.runs == {f"k{index}": 1 for index in range(5)}
    assert proxy.connections > 5
    assert len(service.calls) > 5


async def test_nothing_is_left_behind() -> None:
    async def calls() -> None:
        service = CounterService(lost_answers=1)
        async with serving(service) as url, connector() as to, to.connect(source(url), CALLER) as session:
            await session.list_tools()
            hanging = [asyncio.create_task(session.call(call("hang", f"h{index}"))) for index in range(10)]
            await asyncio.gather(*(session.call(call("add", f"k{index}", amount=1)) for index in range(20)))
            for task in hanging:
                task.cancel()
            await asyncio.gather(*hanging, return_exceptions=True)

    await calls()  # gRPC keeps its own threads and descriptors from the first call on
    before = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
    for _ in range(3):
        await calls()
    for _ in range(200):
        after = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
        if after <= before:
            break
        await asyncio.sleep(0.02)
    assert after <= before

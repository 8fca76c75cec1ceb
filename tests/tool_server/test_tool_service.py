"""ToolService of `rollout tools serve`, called by a gRPC client."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from osmosis.rollout.v1 import tool_service_pb2 as pb
from osmosis.rollout.v1 import tool_service_pb2_grpc as stubs
from rollout_server.authoring.tool_loader import load_tools
from rollout_server.edge.wire.toolset import parse_result, result_to_proto
from rollout_server.runtime.ports import Content
from rollout_server.tool_server.limits import ToolServerLimits
from rollout_server.tool_server.server import ToolServerSettings, open_server

from tests.support.tool_server import TOOLS, call_request, exists, output_text, serve_tools

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


def stub_at(channel: grpc.aio.Channel) -> stubs.ToolServiceAsyncStub:
    return stubs.ToolServiceStub(channel)


async def code_of(call: grpc.aio.UnaryUnaryCall) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code()


async def test_calls_of_many_rollouts_share_the_state_of_their_rollout_only(tmp_path: Path) -> None:
    async with (
        serve_tools(tmp_path) as serving,
        grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}") as channel,
    ):
        stub = stub_at(channel)

        async def count(uid: str) -> list[str]:
            return [
                output_text(await stub.CallTool(call_request("add", '{"amount": 1}', key=f"{uid}/{n}", uid=uid)))
                for n in range(5)
            ]

        counted = await asyncio.gather(*(count(f"rollout-{n}") for n in range(50)))
        assert counted == [["1", "2", "3", "4", "5"]] * 50

        described = await stub.DescribeTools(pb.DescribeToolsRequest(uid="rollout-1"))
        assert list(described.idempotent_tools) == ["upper"]
        first = described.tools[0]
        assert (first.name, first.description.splitlines()[0]) == ("add", "Add to the counter of the rollout.")
        assert json.loads(first.parameters_json_schema)["properties"].keys() == {"amount"}

        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="osmosis.rollout.v1.ToolService"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_tools_run_under_their_own_policies(tmp_path: Path) -> None:
    async with (
        serve_tools(tmp_path) as serving,
        grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}") as channel,
    ):
        stub = stub_at(channel)

        async def called(name: str, arguments: str = "{}", uid: str = "u", metadata: str = "") -> pb.CallToolResponse:
            return await stub.CallTool(
                call_request(name, arguments, key=f"{name}{arguments}", uid=uid, metadata=metadata)
            )

        assert output_text(await called("upper", '{"text": "a"}')) == "A"
        assert output_text(await called("pid")) not in ("", str(serving.process.pid))
        assert (await called("slow")).error.message == "slow took longer than 0.05 s"
        assert (await called("refuse")).error.message == "there is no such thing"
        assert not (await called("refuse")).error.may_have_run
        assert (await called("nothing")).error.message.startswith("Unknown function 'nothing'")
        assert "amount" in (await called("add", '{"amount": "1"}')).error.message
        assert "must be" not in (await called("add", '{"amount": 1}')).error.message
        assert (await called("add", "{")).error.message.startswith("Invalid JSON arguments")
        assert "cannot use `model`" in (await called("judged")).error.message
        seen = output_text(await called("whose", metadata='{"split": "train"}'))
        assert seen == "u '' {'split': 'train'} {'day': 1} False UTC True"
        long = output_text(await called("long"))
        assert "characters are missing]" in long
        assert len(long) < 1_100_000
        parts = (await called("picture")).output.parts
        assert (parts[0].text, parts[1].blob.media_type, parts[1].blob.inline) == ("a dot", "image/png", b"png bytes")


async def test_each_key_runs_once(tmp_path: Path) -> None:
    async with (
        serve_tools(tmp_path) as serving,
        grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}") as channel,
    ):
        stub, file = stub_at(channel), tmp_path / "go"
        waiting = call_request("wait_for", json.dumps({"file": str(file)}), key="k", uid="u")
        first, *joined = [stub.CallTool(waiting) for _ in range(20)]
        begun = tmp_path / "go.begun"
        await exists(begun)
        first.cancel()  # the call goes on for the others, and for whoever repeats it
        file.write_text("done")
        assert {output_text(await each) for each in joined} == {"done"}
        file.write_text("changed")
        assert output_text(await stub.CallTool(waiting)) == "done"
        assert begun.read_text() == "u\n"

        other = call_request("wait_for", json.dumps({"file": "other"}), key="k", uid="u")
        assert await code_of(stub.CallTool(other)) is grpc.StatusCode.INVALID_ARGUMENT
        waiting.uid = "another"
        assert await code_of(stub.CallTool(waiting)) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_call_whose_caller_disconnected_can_be_had_again(tmp_path: Path) -> None:
    async with serve_tools(tmp_path) as serving:
        file, begun = tmp_path / "go", tmp_path / "go.begun"
        waiting = call_request("wait_for", json.dumps({"file": str(file)}), key="k", uid="u")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}") as channel:
            lost = stub_at(channel).CallTool(waiting)
            await exists(begun)
            lost.cancel()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}") as channel:
            again = stub_at(channel).CallTool(waiting)
            file.write_text("done")
            assert output_text(await again) == "done"
        assert begun.read_text() == "u\n"


async def test_malformed_requests_are_refused(tmp_path: Path) -> None:
    async with (
        serve_tools(tmp_path) as serving,
        grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}") as channel,
    ):
        stub = stub_at(channel)
        upper = '{"text": "a"}'
        wrong = [
            call_request("upper", upper, key=""),
            call_request("upper", upper, key="k" * 513),
            call_request("upper", upper, key="k", uid="u" * 513),
            call_request("upper", upper, key="k", metadata="[]"),
            call_request("", upper, key="k"),
            pb.CallToolRequest(call_key="k"),
        ]
        for request in wrong:
            assert await code_of(stub.CallTool(request)) is grpc.StatusCode.INVALID_ARGUMENT, request
        bad = pb.DescribeToolsRequest(metadata_json="{")
        assert await code_of(stub.DescribeTools(bad)) is grpc.StatusCode.INVALID_ARGUMENT
        raw = channel.unary_unary("/osmosis.rollout.v1.ToolService/CallTool")
        assert await code_of(raw(b"\xff\xff\xff")) is grpc.StatusCode.INVALID_ARGUMENT
        large = call_request("upper", json.dumps({"text": "x" * 5_000_000}), key="k")
        assert await code_of(stub.CallTool(large)) is EXHAUSTED
        assert output_text(await stub.CallTool(call_request("upper", upper, key="k"))) == "A"


PARTS = [
    {"type": "text", "text": "a"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,cG5n"}},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,cG5n", "detail": "low"}},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}},
    {"type": "text", "text": "a", "more": [1, None]},
]


@pytest.mark.parametrize("content", ["", "text", "\ud800", [], PARTS, *([part] for part in PARTS)], ids=str)
async def test_results_arrive_as_they_were_returned(content: Content) -> None:
    parsed = await parse_result(result_to_proto(content).SerializeToString())
    expected = {"\ud800": "?"}.get(content, content) if isinstance(content, str) else content
    assert parsed == (expected or "")


def retry_seconds(error: grpc.aio.AioRpcError) -> float:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    info = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    return info.retry_delay.ToTimedelta().total_seconds()


@pytest.mark.parametrize(("limits", "reason"), [({"rollouts": 10}, "10 rollouts"), ({"calls": 10}, "10 calls")])
async def test_a_flood_is_refused_and_may_come_back(tmp_path: Path, limits: dict[str, int], reason: str) -> None:
    file = tmp_path / "go"
    (tmp_path / f"{reason.replace(' ', '_')}.py").write_text(TOOLS)
    loaded = load_tools(str(tmp_path / f"{reason.replace(' ', '_')}.py"))
    settings = ToolServerSettings(grpc_port=0, http_port=0, limits=ToolServerLimits(**limits))
    async with (
        open_server(loaded, settings) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        stub = stub_at(channel)
        requests = [
            call_request("wait_for", json.dumps({"file": str(file)}), key=f"k{n}", uid=f"u{n}") for n in range(100)
        ]
        responses, refused = [], []

        async def call(request: pb.CallToolRequest) -> None:
            try:
                responses.append(await stub.CallTool(request))
            except grpc.aio.AioRpcError as error:
                refused.append(error)
                if len(refused) == 90:
                    file.write_text("done")

        await asyncio.gather(*map(call, requests))
        assert {error.code() for error in refused} == {EXHAUSTED}
        assert all(reason in str(error.details()) and retry_seconds(error) > 0 for error in refused)
        assert [output_text(each) for each in responses] == ["done"] * 10
        assert server.served.states == 0  # they left no state
        assert output_text(await stub.CallTool(requests[0])) == "done"
        assert output_text(await stub.CallTool(requests[99])) == "done"


@pytest.mark.parametrize("idle_seconds", [0.05, 3600])
async def test_the_state_of_rollouts_is_bounded_and_expires(tmp_path: Path, idle_seconds: float) -> None:
    module = f"bounded_{idle_seconds:g}".replace(".", "_")
    (tmp_path / f"{module}.py").write_text(TOOLS)
    limits = ToolServerLimits(rollouts=3, idle_seconds=idle_seconds, dropped=1)
    settings = ToolServerSettings(grpc_port=0, http_port=0, limits=limits)
    async with (
        open_server(load_tools(str(tmp_path / f"{module}.py")), settings) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        stub = stub_at(channel)

        async def add(uid: str, key: str) -> str:
            return output_text(await stub.CallTool(call_request("add", '{"amount": 1}', key=key, uid=uid)))

        if idle_seconds < 1:
            assert await add("a", "a1") == "1"
            await asyncio.sleep(0.1)
            assert await add("b", "b1") == "1"  # drops what has expired
            assert server.served.states == 1
            for name, arguments, key in (("add", '{"amount": 1}', "a2"), ("upper", '{"text": "x"}', "a3")):
                error = (await stub.CallTool(call_request(name, arguments, key=key, uid="a"))).error
                assert "no longer has the state of this rollout" in error.message
                assert not error.may_have_run
            assert await add("a", "a1") == "1"  # its key is still known
            await asyncio.sleep(0.1)
            assert await add("c", "c1") == "1"  # drops that of b; only one is remembered
            assert await add("a", "a2") == "1"
            return
        assert [await add(uid, uid) for uid in "abc"] == ["1", "1", "1"]
        refused = stub.CallTool(call_request("add", '{"amount": 1}', key="d", uid="d"))
        assert await code_of(refused) is EXHAUSTED
        assert server.served.states == 3
        assert await add("a", "a2") == "2"
        stateless = call_request("upper", '{"text": "x"}', key="none")
        assert output_text(await stub.CallTool(stateless)) == "X"

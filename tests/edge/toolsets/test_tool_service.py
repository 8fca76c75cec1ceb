"""ToolService: what is sent, how a call is repeated, and what becomes of results and errors."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from opentelemetry import trace
from osmosis.rollout.v1 import message_pb2
from osmosis.rollout.v1 import tool_service_pb2 as pb
from rollout_server.edge.toolsets.tool_service import ToolServiceTimes
from rollout_server.runtime.errors import ArgumentError, ToolError
from rollout_server.runtime.tools.protocols import ToolFailed
from rollout_server.runtime.tools.toolset import ListedTool, ToolsetCaller

from tests.edge.tracing.conftest import exported, no_sdk
from tests.edge.tracing.stage import Exported
from tests.support.certificates import Authority
from tests.support.grpc_trainer import Fault
from tests.support.tool_service import QUICK, CounterService, call, connector, response, serving, source

__all__ = ["exported", "no_sdk"]

Code = grpc.StatusCode
SECRET = "sk-tools-0123456789abcdef"
CALLER = ToolsetCaller("u1", '{"task": 7}', SECRET)
PNG = b"\x89PNG\r\n"


def broken(text: str) -> pb.CallToolResponse:
    """The error of a tool that broke down."""
    return pb.CallToolResponse(error=pb.ToolError(message=text, may_have_run=True))


def soon(code: grpc.StatusCode, **delay: int) -> Fault:
    """A status that names the time until the next attempt."""
    return Fault(code, "busy", (error_details_pb2.RetryInfo(retry_delay=Duration(**delay)),))


async def test_tools_are_listed_as_they_came() -> None:
    service = CounterService(replies={"read": []}, idempotent=("read", "unknown"))
    async with serving(service) as url, connector() as to, to.connect(source(url), CALLER) as session:
        tools = await session.list_tools()
    schema = '{"type": "object", "properties": {"amount": {"type": "integer"}}}'
    assert [*tools] == [ListedTool("add", "?", schema), ListedTool("read", "?", schema, idempotent=True)]
    assert service.listings == [pb.DescribeToolsRequest(uid="u1", metadata_json='{"task": 7}')]


async def test_a_call_carries_the_rollout_and_its_credentials() -> None:
    service = CounterService()
    async with serving(service) as url, connector() as to, to.connect(source(url), CALLER) as session:
        assert await session.call(call("add", "k1", amount=2)) == "2"
    (sent,), (metadata,) = service.calls, service.metadata
    called = message_pb2.ToolCall(id="model-k1", name="add", arguments_json='{"amount": 2}')
    assert sent == pb.CallToolRequest(uid="u1", call_key="k1", call=called, metadata_json='{"task": 7}')
    assert metadata["authorization"] == f"Bearer {SECRET}"
    assert "traceparent" not in metadata


async def test_a_call_belongs_to_the_current_span(exported: Exported) -> None:
    service = CounterService()
    async with serving(service) as url, connector() as to, to.connect(source(url), ToolsetCaller("u1")) as session:
        with trace.get_tracer("test").start_as_current_span("tool") as span:
            await session.call(call("add", "k1", amount=2))
    (metadata,) = service.metadata
    assert metadata["traceparent"].split("-")[1] == f"{span.get_span_context().trace_id:032x}"
    assert "authorization" not in metadata


async def test_parts_become_content() -> None:
    parts = [
        message_pb2.ContentPart(text="a"),
        message_pb2.ContentPart(blob=message_pb2.Blob(media_type="image/png", inline=PNG)),
        message_pb2.ContentPart(json='{"type": "text", "text": "b", "more": 1}'),
    ]
    replies = [pb.CallToolResponse(output=pb.ToolOutput(parts=given)) for given in (parts, parts[:1], [])]
    service = CounterService(replies={"see": replies})
    async with serving(service) as url, connector() as to, to.connect(source(url), CALLER) as session:
        results = [await session.call(call("see", f"k{index}")) for index in range(3)]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0K"}}
    assert results == [[{"type": "text", "text": "a"}, image, {"type": "text", "text": "b", "more": 1}], "a", ""]


async def test_an_error_of_the_tool_is_for_the_model() -> None:
    wrong = pb.CallToolResponse(error=pb.ToolError(message="no such file"))
    service = CounterService(replies={"see": [wrong, pb.CallToolResponse(error=pb.ToolError())]})
    async with serving(service) as url, connector() as to, to.connect(source(url), CALLER) as session:
        with pytest.raises(ToolError, match=r"^no such file$"):
            await session.call(replace(call("see", "k1"), idempotent=True))
        with pytest.raises(ToolError, match="without a text"):
            await session.call(replace(call("see", "k2"), idempotent=True))
    assert [sent.call_key for sent in service.calls] == ["k1", "k2"]


async def test_arguments_that_json_cannot_express_are_the_models_error() -> None:
    service = CounterService()
    async with serving(service) as url, connector() as to, to.connect(source(url), CALLER) as session:
        with pytest.raises(ArgumentError, match="infinite"):
            await session.call(call("add", "k1", amount=float("inf")))
    assert service.calls == []


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED])
async def test_refused_attempts_are_repeated_with_the_same_key(code: grpc.StatusCode) -> None:
    faults = [Fault(code), soon(code, nanos=1000), soon(code), Fault(code)]
    service = CounterService(faults=[*faults])
    async with serving(service) as url, connector() as to, to.connect(source(url), CALLER) as session:
        assert [tool.name for tool in await session.list_tools()] == ["add"]
        assert len(service.listings) == 5
        service.faults += faults
        assert await session.call(call("add", "k1", amount=2)) == "2"
    assert [sent.call_key for sent in service.calls] == ["k1"] * 5


async def test_a_lost_answer_is_fetched_again_and_the_call_runs_once() -> None:
    service = CounterService(lost_answers=3)
    async with serving(service) as url, connector() as to, to.connect(source(url), CALLER) as session:
        assert [await session.call(call("add", key, amount=1)) for key in ("a", "b")] == ["1", "2"]
    assert service.runs == {"a": 1, "b": 1}


async def test_a_wait_that_is_too_long_is_a_failure_at_once() -> None:
    service = CounterService(faults=[soon(Code.UNAVAILABLE, seconds=10**6)] * 2)
    async with serving(service) as url, connector() as to, to.connect(source(url), CALLER) as session:
        with pytest.raises(ToolFailed, match=r"DescribeTools: answered UNAVAILABLE: busy$"):
            await session.list_tools()
        with pytest.raises(ToolFailed, match=r"CallTool: answered UNAVAILABLE: busy$"):
            await session.call(call("add", "k1", amount=2))
    assert len(service.calls) == 1


async def test_repetition_ends() -> None:
    service = CounterService(faults=[Fault(Code.UNAVAILABLE)] * 1000)
    times = ToolServiceTimes(first=0.005, most=0.02, unavailable=0.2)
    async with serving(service) as url, connector(times) as to, to.connect(source(url), CALLER) as session:
        with pytest.raises(ToolFailed, match=r"UNAVAILABLE: no \(\d+ attempts\)$"):
            await session.call(call("add", "k1", amount=2))
    assert 1 < len(service.calls) < 100


FINAL = [code for code in Code if code not in (Code.OK, Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED)]


@pytest.mark.parametrize("code", FINAL, ids=lambda code: code.name)
async def test_any_other_code_is_a_failure_that_names_code_and_server(code: grpc.StatusCode) -> None:
    service = CounterService(faults=[Fault(code, f"key {SECRET} {'x' * 1500}")] * 2)
    async with serving(service) as url, connector() as to, to.connect(source(url), CALLER) as session:
        for send in (session.list_tools, lambda: session.call(call("add", "k1", amount=2))):
            with pytest.raises(ToolFailed) as failed:
                await send()
            text = str(failed.value)
            assert f"answered {code.name}: key [redacted] xxx" in text
            assert url in text
            assert SECRET not in text
            assert len(text) < 1000
        assert await session.call(call("add", "k2", amount=2)) == "2"


async def test_an_idempotent_tool_that_broke_down_is_called_once_more_with_another_key() -> None:
    replies = {"see": [broken("one"), response("fine"), broken("two"), broken("three")]}
    service = CounterService(replies=replies)
    async with serving(service) as url, connector() as to, to.connect(source(url), CALLER) as session:
        assert await session.call(replace(call("see", "k1"), idempotent=True)) == "fine"
        with pytest.raises(ToolError, match=r"^three$"):
            await session.call(replace(call("see", "k2"), idempotent=True))
    keys = [sent.call_key for sent in service.calls]
    assert len(set(keys)) == 4
    assert keys[::2] == ["k1", "k2"]


async def test_a_tool_that_is_not_idempotent_is_never_called_with_another_key() -> None:
    service = CounterService(replies={"see": [broken("one")]})
    async with serving(service) as url, connector() as to, to.connect(source(url), CALLER) as session:
        with pytest.raises(ToolError, match=r"^one$"):
            await session.call(call("see", "k1"))
    assert len(service.calls) == 1


async def test_a_cancelled_call_is_cancelled_at_the_tool_server() -> None:
    service = CounterService()
    async with serving(service) as url, connector() as to, to.connect(source(url), CALLER) as session:
        task = asyncio.create_task(session.call(call("hang", "k1")))
        await service.began.wait()
        task.cancel()
        await service.cancelled.wait()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await session.call(call("add", "k2", amount=2)) == "2"


async def test_a_pause_between_attempts_can_be_cancelled() -> None:
    service = CounterService(faults=[soon(Code.UNAVAILABLE, seconds=100)])
    times = ToolServiceTimes(unavailable=1000)
    async with serving(service) as url, connector(times) as to, to.connect(source(url), CALLER) as session:
        task = asyncio.create_task(session.call(call("add", "k1", amount=2)))
        while not service.calls:  # noqa: ASYNC110 - the server is in this process
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert service.runs == {}


async def test_a_certificate_is_checked_before_anything_is_sent(tmp_path: Path) -> None:
    authority, service = Authority(), CounterService()
    pair = authority.put(tmp_path)
    credentials = grpc.ssl_server_credentials([(pair.key.read_bytes(), pair.cert.read_bytes())])
    async with serving(service, credentials=credentials) as url:
        async with connector(ca=authority.put_ca(tmp_path)) as to, to.connect(source(url), CALLER) as session:
            assert await session.call(call("add", "k1", amount=2)) == "2"
        times = ToolServiceTimes(listing=0.2)
        async with connector(times) as to, to.connect(source(url), CALLER) as session:
            with pytest.raises(ToolFailed, match="could not be reached"):
                await session.list_tools()
    assert url.startswith("grpcs:")
    assert len(service.metadata) == 1


async def test_a_target_that_the_rules_refuse_is_not_called() -> None:
    service = CounterService()
    async with (
        serving(service) as url,
        connector(QUICK, "10.0.0.0/8") as to,
        to.connect(source(url), CALLER) as session,
    ):
        with pytest.raises(ToolFailed, match="ROLLOUT_TARGETS do not allow") as failed:
            await session.list_tools()
    assert url in str(failed.value)
    assert service.listings == []

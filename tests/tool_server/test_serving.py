"""Keys, loading and the end of `rollout tools serve`."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import grpc
import httpx
import pytest
from osmosis.rollout.v1 import tool_service_pb2 as pb
from osmosis.rollout.v1 import tool_service_pb2_grpc as stubs
from rollout_server.authoring.author_traceback import AuthorError
from rollout_server.authoring.tool_loader import load_tools

from tests.support.processes import command
from tests.support.tool_server import call_request, exists, output_text, serve_tools

KEY = "rk_a_key_for_tests"
AGENT = '''
from rollout_server import Agent, Run, tool


@tool
def first() -> str:
    """Return a text."""
    return "first"


@tool
def second(run: Run) -> str:
    """Return what start prepared."""
    return prepared[0]


@tool
def spare() -> str:
    """Belongs to no agent."""
    return "spare"


prepared = []


class Prepared(Agent):
    name = "prepared"
    version = "7"
    tools = [first, second]

    def start(self):
        prepared.append("ready")


pair = (first, spare)
'''

MANY = "from rollout_server import tool\n" + "\n".join(f"@tool\ndef t{n}() -> int:\n    return {n}" for n in range(257))


async def test_callers_need_the_key(tmp_path: Path) -> None:
    async with (
        serve_tools(tmp_path, "--host", "0.0.0.0", source=AGENT, ROLLOUT_TOOLS_KEY=KEY) as serving,
        grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}") as channel,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        stub = stubs.ToolServiceStub(channel)
        url = serving.mcp_url.replace("0.0.0.0", "127.0.0.1")
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            for call in (
                stub.DescribeTools(pb.DescribeToolsRequest(), metadata=metadata),
                stub.CallTool(call_request("first", key="k"), metadata=metadata),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await call
                assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
            response = await client.post(url, headers=dict(metadata), json={})
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
        with_key = (("authorization", f"Bearer {KEY}"),)
        assert output_text(await stub.CallTool(call_request("second", key="k"), metadata=with_key)) == "ready"
        assert (await client.post(url, headers=dict(with_key), json={})).status_code == 400
        assert KEY not in serving.text


async def test_a_running_call_finishes_and_new_ones_are_refused_at_the_end(tmp_path: Path) -> None:
    async with (
        serve_tools(tmp_path) as serving,
        grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}") as channel,
    ):
        stub, file = stubs.ToolServiceStub(channel), tmp_path / "go"
        running = stub.CallTool(call_request("wait_for", json.dumps({"file": str(file)}), key="k", uid="u"))
        await exists(tmp_path / "go.begun")
        serving.send(signal.SIGTERM)
        await serving.logged("stopping: running calls have 20 s")
        late = await asyncio.gather(
            *(stub.CallTool(call_request("refuse", key=f"k{n}")) for n in range(20)), return_exceptions=True
        )
        assert isinstance(late[-1], grpc.aio.AioRpcError), late
        assert (late[-1].code(), late[-1].details()) == (grpc.StatusCode.UNAVAILABLE, "the tool server is stopping")
        file.write_text("done")
        assert output_text(await running) == "done"
        assert await serving.ended() == 0
        assert "Traceback" not in serving.text


async def test_a_second_signal_cancels_running_calls(tmp_path: Path) -> None:
    async with (
        serve_tools(tmp_path) as serving,
        grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}") as channel,
    ):
        stub = stubs.ToolServiceStub(channel)
        running = stub.CallTool(call_request("wait_for", '{"file": "never"}', key="k", uid="u"))
        await exists(tmp_path / "never.begun")
        serving.send(signal.SIGTERM)
        await serving.logged("stopping: running calls have 20 s")
        serving.send(signal.SIGTERM)
        response = await running
        assert (response.error.message, response.error.may_have_run) == ("The tool server cancelled the call", True)
        assert await serving.ended() == 0
        assert "Traceback" not in serving.text


async def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    async with serve_tools(tmp_path) as serving:
        again = ("tools", "serve", "tools.py", "--http-port", "0", "--grpc-port", str(serving.grpc_port))
        failed = await command(*again, cwd=tmp_path)
        assert failed.code == 1
        assert failed.err.count("\n") == 1, failed.err
        assert f"cannot listen on 127.0.0.1:{serving.grpc_port}" in failed.err


def written(folder: Path, source: str, name: str) -> str:
    (folder / f"{name}.py").write_text(source)
    return str(folder / f"{name}.py")


def test_what_a_reference_names(tmp_path: Path) -> None:
    path = written(tmp_path, AGENT, "named_tools")
    agent = load_tools(path)
    assert (agent.name, agent.version, [each.name for each in agent.tools]) == ("prepared", "7", ["first", "second"])
    assert agent.agent is not None
    one = load_tools(f"{path}:spare")
    assert (one.name, one.agent, [each.name for each in one.tools]) == ("named_tools", None, ["spare"])
    assert [each.name for each in load_tools(f"{path}:pair").tools] == ["first", "spare"]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("", "contains no tool"),
        (MANY, "at most 256"),
        (AGENT + "\n\nclass Other(Agent):\n    name = 'other'\n", "contains 2 agents"),
        ("from rollout_server import Agent\nclass A(Agent):\n    name = 'a'\n", "contains no tool"),
        (AGENT.replace("class Prepared(Agent)", "class _Hidden(Agent)") + "\nagain = (first, first)", ""),
    ],
)
def test_files_that_cannot_be_served(tmp_path: Path, source: str, text: str) -> None:
    path = written(tmp_path, source, f"refused_{abs(hash(source)) % 10_000_000}")
    if not text:
        assert len(load_tools(path).tools) == 3  # without a public agent they are all tools of the module
        path, text = f"{path}:again", "more than one tool has the name 'first'"
    with pytest.raises(AuthorError, match=text):
        load_tools(path)

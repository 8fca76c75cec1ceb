"""The MCP server of `rollout tools serve`, called by the client of the official SDK, over HTTP and on standard input."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
from pathlib import Path

import httpx
import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.shared.exceptions import MCPError
from mcp.types import ImageContent, TextContent
from rollout_server.authoring.tool_loader import load_tools
from rollout_server.runtime.tools.toolset import CALL_META_KEY, UID_META_KEY
from rollout_server.tool_server.limits import ToolServerLimits
from rollout_server.tool_server.server import ToolServerSettings, open_server

from tests.support.processes import COMMAND, environment
from tests.support.tool_server import TOOLS, exists, mcp_client, result_text, serve_tools

ERAS = ("2025-11-25", "2026-07-28")


async def test_calls_of_many_rollouts_share_the_state_of_their_rollout_only(tmp_path: Path) -> None:
    async with serve_tools(tmp_path) as serving:

        async def count(era: str, number: int) -> list[str]:
            uid = f"{era}/{number}"
            async with mcp_client(serving.mcp_url, era) as client:
                calls = [
                    await client.call_tool("add", {"amount": 1}, meta={UID_META_KEY: uid, CALL_META_KEY: f"{uid}/{n}"})
                    for n in range(3)
                ]
            return [result_text(each) for each in calls]

        for era in ERAS:
            counted = await asyncio.gather(*(count(era, number) for number in range(25)))
            assert counted == [["1", "2", "3"]] * 25


@pytest.mark.parametrize("era", ERAS)
async def test_both_eras_over_http(tmp_path: Path, era: str) -> None:
    async with serve_tools(tmp_path) as serving, mcp_client(serving.mcp_url, era) as client:
        assert client.protocol_version == era
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        annotations = listed["upper"].annotations
        assert annotations is not None
        assert annotations.idempotent_hint
        assert listed["add"].annotations is None
        assert listed["add"].input_schema["properties"].keys() == {"amount"}
        assert result_text(await client.call_tool("upper", {"text": "a"})) == "A"

        refused = await client.call_tool("refuse", {})
        assert (refused.is_error, refused.content) == (True, [TextContent(type="text", text="there is no such thing")])
        text, image = (await client.call_tool("picture", {})).content
        assert isinstance(text, TextContent)
        assert isinstance(image, ImageContent)
        assert (text.text, image.mime_type, base64.b64decode(image.data)) == ("a dot", "image/png", b"png bytes")

        own = [result_text(await client.call_tool("add", {"amount": 1})) for _ in range(2)]
        # A session has a state, a single request has its own.
        assert own == (["1", "2"] if era == "2025-11-25" else ["1", "1"])
        async with mcp_client(serving.mcp_url, era) as another:
            assert result_text(await another.call_tool("add", {"amount": 1})) == "1"


async def test_a_call_key_runs_once_over_mcp(tmp_path: Path) -> None:
    async with serve_tools(tmp_path) as serving, mcp_client(serving.mcp_url, ERAS[1]) as client:
        meta = {UID_META_KEY: "u", CALL_META_KEY: "k"}
        repeated = [result_text(await client.call_tool("add", {"amount": 1}, meta=meta)) for _ in range(3)]
        assert repeated == ["1", "1", "1"]
        with pytest.raises(MCPError, match="call_key"):
            await client.call_tool("add", {"amount": 2}, meta=meta)
        with pytest.raises(MCPError, match="must be a string"):
            await client.call_tool("add", {"amount": 2}, meta={UID_META_KEY: 7})


async def test_hostile_requests_over_http(tmp_path: Path) -> None:
    async with serve_tools(tmp_path) as serving, httpx.AsyncClient(trust_env=False) as client:
        url = serving.mcp_url
        accept = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
        assert (await client.get(url.replace("/mcp", "/health"))).text == "ok\n"
        assert (await client.get(url.replace("/mcp", "/other"))).status_code == 404
        page = await client.post(url, headers={**accept, "origin": "https://example.com"}, content="{}")
        assert page.status_code == 403
        rebound = await client.post(url, headers={**accept, "host": "example.com"}, content="{}")
        assert rebound.status_code == 421
        large = await client.post(url, headers=accept, content=b"x" * 5_000_000)
        assert large.status_code == 413
        for content in (b"{", b"[]", b"[" * 100_000, b'{"jsonrpc": "2.0"}', b"\xff"):
            assert (await client.post(url, headers=accept, content=content)).status_code == 400
            modern = {**accept, "mcp-protocol-version": ERAS[1]}
            assert (await client.post(url, headers=modern, content=content)).status_code == 400
        async with mcp_client(url, ERAS[0]) as working:
            assert result_text(await working.call_tool("upper", {"text": "a"})) == "A"


async def test_sessions_and_calls_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "few_sessions.py").write_text(TOOLS)
    limits = ToolServerLimits(sessions=2, calls=2)
    settings = ToolServerSettings(grpc_port=0, http_port=0, limits=limits)
    file = tmp_path / "go"
    async with open_server(load_tools(str(tmp_path / "few_sessions.py")), settings) as server:
        url = f"http://127.0.0.1:{server.http_port}/mcp"
        async with mcp_client(url, ERAS[0]) as first, mcp_client(url, ERAS[0]):
            with pytest.raises(BaseExceptionGroup) as refused:
                async with mcp_client(url, ERAS[0]):
                    pass
            assert refused.group_contains(MCPError, match="Too many open sessions|503")
            waiting = [asyncio.create_task(first.call_tool("wait_for", {"file": str(file)})) for _ in range(2)]
            await exists(tmp_path / "go.begun", lines=2)
            with pytest.raises(MCPError, match="2 calls are running") as many:
                await first.call_tool("upper", {"text": "a"})
            assert many.value.data == {"reason": "TOO_MANY_CALLS", "retryAfterSeconds": 1.0}
            file.write_text("done")
            assert [result_text(await each) for each in waiting] == ["done", "done"]
            assert result_text(await first.call_tool("upper", {"text": "a"})) == "A"


def on_stdio(folder: Path) -> StdioServerParameters:
    (folder / "tools.py").write_text(f"print('imported')\n{TOOLS}")
    arguments = [*COMMAND[1:], "tools", "serve", str(folder / "tools.py"), "--stdio"]
    return StdioServerParameters(command=sys.executable, args=arguments, env=environment())


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_standard_input_carries_nothing_but_mcp(tmp_path: Path, mode: str) -> None:
    with (tmp_path / "log").open("w+") as log:
        async with Client(stdio_client(on_stdio(tmp_path), errlog=log), mode=mode) as client:
            assert client.protocol_version == ERAS[mode == "auto"]
            assert result_text(await client.call_tool("upper", {"text": "a"})) == "A"
            own = [result_text(await client.call_tool("add", {"amount": 1})) for _ in range(2)]
            assert own == ["1", "2"]
            others = await client.call_tool("add", {"amount": 1}, meta={UID_META_KEY: "u"})
            assert result_text(others) == "1"
            assert int(result_text(await client.call_tool("pid", {}))) > 0
        log.seek(0)
        printed = log.read()
    for line in ("imported", "this line is not part of any protocol", "nor is this one"):
        assert line in printed
    assert "Traceback" not in printed


async def test_a_signal_lets_calls_on_standard_input_finish(tmp_path: Path) -> None:
    parameters, file = on_stdio(tmp_path), tmp_path / "go"
    process = await asyncio.create_subprocess_exec(
        parameters.command,
        *parameters.args,
        env=parameters.env,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        hello = {"protocolVersion": ERAS[0], "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
        call = {"name": "wait_for", "arguments": {"file": str(file)}}
        for message in (
            {"id": 1, "method": "initialize", "params": hello},
            {"method": "notifications/initialized"},
            {"id": 2, "method": "tools/call", "params": call},
        ):
            process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        await exists(tmp_path / "go.begun")
        os.kill(process.pid, signal.SIGTERM)
        file.write_text("done")
        lines = [json.loads(line) async for line in process.stdout]
        assert [line["id"] for line in lines] == [1, 2]
        assert lines[1]["result"]["content"] == [{"type": "text", "text": "done"}]
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_message_over_the_limit_ends_the_server_on_standard_input(tmp_path: Path) -> None:
    parameters = on_stdio(tmp_path)
    process = await asyncio.create_subprocess_exec(
        parameters.command,
        *parameters.args,
        env=parameters.env,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate(b"x" * 5_000_000 + b"\n")
    assert (process.returncode, out) == (1, b"")
    assert b"rollout tools serve: a message has more than 4,194,304 bytes" in err
    assert b"Traceback" not in err

"""The pages about tools from elsewhere: snippets run, and faults have the results of the table, with real tool servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from osmosis.rollout.v1.tool_service_pb2 import CallToolResponse
from rollout_client import AsyncClient, messages
from rollout_server import Agent, mcp
from rollout_server.app import Server
from rollout_server.local_stack import LocalStack, LoopThread, ScriptedModel
from rollout_server.runtime.run.lifecycle import AgentFailed
from rollout_server.settings import Settings

from bench.programs.child import free_port
from tests.support import mcp_faulty
from tests.support.engine_model import EngineModel
from tests.support.engines import VllmEngine
from tests.support.engines import serving as serving_engine
from tests.support.grpc_trainer import Fault
from tests.support.mcp_faulty_http import faulty_mcp
from tests.support.processes import command
from tests.support.tool_server import serve_tools
from tests.support.tool_service import CounterService
from tests.support.tool_service import serving as serving_tools

DOCS = Path(__file__).resolve().parents[2] / "docs"
Serving = Callable[..., LocalStack]


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)


def table(title: str) -> dict[str, str]:
    """The first two columns of the table below a title of toolsets.md."""
    section = next(part for part in (DOCS / "toolsets.md").read_text().split("\n## ") if part.startswith(f"{title}\n"))
    rows = [re.split(r" \| ", line.strip("| ")) for line in section.splitlines() if line.startswith("|")]
    return {row[0]: row[1] for row in rows[2:]}


FAULTS = table("When a tool server fails")


class Plain(Agent):
    """Has no tools of its own."""

    name = "plain"


def faulty_program(fault: str) -> Agent:
    """An agent with the tools of a program that does this when it is called."""

    class Faulty(Agent):
        name = "faulty"
        tools = (mcp([sys.executable, "-S", mcp_faulty.__file__, fault]),)

    return Faulty()


def check(fault: str, result: object) -> None:
    """Check a result against the text of the table."""
    text = FAULTS[fault].strip("`").strip()
    pattern = ".*".join(re.escape(part) for part in text.split("…"))
    assert re.fullmatch(pattern, str(result), re.DOTALL), f"{text}\n{result}"


PROGRAMS = {
    "the tool reports an error": ("error", 1),
    "the program exits during the call": ("exit", 1),
    "a later call of the same rollout": ("exit", 2),
    "the program writes without end": ("endless line", 1),
    "a result has a wrong type": ("wrong type", 1),
}
URLS = {
    "it closes the connection during the call": "reset",
    "it returns HTTP status 500": "status",
    "it was restarted and has lost its sessions": "forgot session",
    "a call takes longer than its time-out": "hang",
    "the MCP server is down": "",
}
SERVICES = {
    "the `ToolService` returns another status": "INVALID_ARGUMENT",
    "the `ToolService` is down, or answers UNAVAILABLE": "UNAVAILABLE",
    "the `ToolService` returns no result": "",
}


def test_the_table_is_complete() -> None:
    assert FAULTS.keys() == {*PROGRAMS, *URLS, *SERVICES}


@pytest.mark.parametrize("fault", PROGRAMS)
def test_programs(serving: Serving, scripted_model: ScriptedModel, fault: str) -> None:
    behaviour, calls = PROGRAMS[fault]
    stack = serving(faulty_program(behaviour))
    for _ in range(calls):
        scripted_model.calls("call")
    rollout = stack.play("?", scripted_model.says("Done."))
    check(fault, rollout.tool_results[-1])
    assert (rollout.failure, rollout.stop) == (None, "stop")


@pytest.mark.parametrize("fault", URLS)
def test_urls(serving: Serving, scripted_model: ScriptedModel, rollout_loop: LoopThread, fault: str) -> None:
    manager = faulty_mcp("")
    faulty = rollout_loop.enter(manager)

    class Remote(Agent):
        name = "remote"
        tools = (mcp(faulty.url, timeout=2 if URLS[fault] == "hang" else 60),)

    stack = serving(Remote())
    faulty.fault = URLS[fault]
    if not faulty.fault:
        rollout_loop.leave(manager)
    rollout = stack.play("?", scripted_model.calls("call").says("Done."))
    check(fault, rollout.tool_results[0])
    assert (rollout.failure, rollout.stop) == (None, "stop")
    if faulty.fault:
        rollout_loop.leave(manager)


class FailingService(CounterService):
    """Answer every call with a status, or with a response that has no result."""

    def __init__(self, status: str) -> None:
        super().__init__()
        self._status = status

    async def CallTool(self, request: Any, context: Any) -> CallToolResponse:  # noqa: N802 - named by the contract
        if self._status:
            await context.abort(grpc.StatusCode[self._status], "amount?")
        return CallToolResponse()


@pytest.mark.parametrize("fault", SERVICES)
def test_services(serving: Serving, scripted_model: ScriptedModel, rollout_loop: LoopThread, fault: str) -> None:
    manager = serving_tools(FailingService(SERVICES[fault]))
    stack, url = serving(Plain(), toolset_seconds=2), rollout_loop.enter(manager)
    rollout = stack.play("?", scripted_model.calls("add", amount=1).says("Done."), tools=url)
    rollout_loop.leave(manager)
    check(fault, rollout.tool_results[0])
    assert (rollout.failure, rollout.stop) == (None, "stop")


@pytest.mark.parametrize("block", blocks("toolsets.md", "text"))
def test_a_list_that_cannot_be_had_fails_the_rollout(
    serving: Serving, scripted_model: ScriptedModel, rollout_loop: LoopThread, block: str
) -> None:
    manager = serving_tools(CounterService(faults=[Fault(grpc.StatusCode.NOT_FOUND, "no such rollout")]))
    stack, url = serving(Plain()), rollout_loop.enter(manager)
    rollout = stack.play("?", scripted_model.says("Done."), tools=url)
    rollout_loop.leave(manager)
    assert rollout.failure == block.strip().replace("grpc://tools:50061", url).replace("...", "no such rollout")
    assert list(rollout.samples) == []


def test_the_agent_of_the_page() -> None:
    defined: dict[str, Any] = {}
    exec(blocks("toolsets-mcp.md")[0], defined)
    today, files, search = defined["Editor"]().tools
    assert today.name == "today"
    assert (files.include, files.session) == (("read_file", "edit_file"), "rollout")
    assert (search.session, search.retries, search.policy.timeout) == ("shared", 2, 20)


def test_a_server_does_not_start_without_the_tools() -> None:
    (block,) = blocks("toolsets-mcp.md", "text")
    url = "http://127.0.0.1:9/mcp"

    class Editor(Agent):
        name = "editor"
        tools = (mcp(url),)

    settings = Settings(_env_file=None, host="127.0.0.1", http_port=0, grpc_port=0)

    async def start() -> None:
        async with Server([Editor()], settings):
            pass

    expected = block.strip().replace("https://search.example.com/mcp", url).removesuffix("...")
    with pytest.raises(AgentFailed, match=f"^{re.escape(expected)}"):
        asyncio.run(start())


@contextlib.contextmanager
def program(code: str, address: str, port: int) -> Iterator[None]:
    """Run a program of a page, which listens on an address, on this port instead."""
    port_of_page = address.rpartition(":")[2]
    assert port_of_page in code
    with subprocess.Popen(
        [sys.executable, "-c", code.replace(port_of_page, str(port))], stderr=subprocess.DEVNULL
    ) as process:
        try:
            until_it_listens(port, process)
            yield
        finally:
            process.kill()


def until_it_listens(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)
    raise AssertionError("the program ended")


def counted(stack: LocalStack, model: ScriptedModel, **fields: Any) -> list[list[Any]]:
    """The results of two rollouts that count 1, 2 and 3."""
    for _ in range(3):
        model.calls("add", amount=1)
    model.says("Done.")
    return [list(stack.play("Count.", model, **fields).tool_results) for _ in range(2)]


def test_the_mcp_server_of_the_page(serving: Serving, scripted_model: ScriptedModel) -> None:
    port = free_port()
    with program(blocks("toolsets-mcp.md")[1], ":8765", port):

        class Counting(Agent):
            name = "counting"
            tools = (mcp(f"http://127.0.0.1:{port}/mcp", session="shared"),)

        assert counted(serving(Counting()), scripted_model) == [["1", "2", "3"]] * 2


def test_the_tool_service_of_the_page(serving: Serving, scripted_model: ScriptedModel) -> None:
    port = free_port()
    with program(blocks("toolsets-service.md")[1], ":50061", port):
        stack = serving(Plain())
        url = f"grpc://127.0.0.1:{port}"
        assert counted(stack, scripted_model, tools=url) == [["1", "2", "3"]] * 2
        wrong = ScriptedModel().calls("add").says("Done.")
        assert stack.play("?", wrong, tools=url).tool_results == ["Error: amount must be an integer"]


CALL = '<tool_call>\n{"name": "add", "arguments": {"amount": 3}}\n</tool_call>'


async def test_the_requests_of_the_page(tmp_path: Path) -> None:
    """The snippet of the client, and that of the REST API, with tools over gRPC and MCP."""
    settings = Settings(_env_file=None, host="127.0.0.1", http_port=0, grpc_port=0)
    engine, service = VllmEngine(EngineModel([CALL, "Three."]), model_name="Qwen/Qwen3-8B"), CounterService()
    async with (
        serving_engine(engine),
        serving_tools(service) as url,
        serve_tools(tmp_path, ROLLOUT_TOOLS_KEY="secret") as served,
        Server([Plain()], settings) as server,
    ):
        addresses = {
            "http://localhost:8000": engine.url,
            "grpc://localhost:50061": url,
            "localhost:50051": f"127.0.0.1:{server.grpc_port}",
            "http://localhost:9000": f"http://127.0.0.1:{server.http_port}",
            "http://localhost:9005/mcp": served.mcp_url,
        }
        snippet, script = blocks("toolsets-service.md")[0], blocks("toolsets-service.md", "sh")[0]
        for written, real in addresses.items():
            snippet, script = snippet.replace(written, real), script.replace(written, real)
        assert await output_of(sys.executable, "-c", snippet) == "stop\n"
        assert [sent["authorization"] for sent in service.metadata] == ["Bearer secret"] * 2
        assert list(service.counters.values()) == [3]

        engine.model.seen.clear()
        started = json.loads(await output_of("sh", "-ec", script))
        uid = started["rollout"]["uid"]
        async with AsyncClient(f"127.0.0.1:{server.grpc_port}") as client:
            outcome = (await client.wait(uid, timeout=60, view="messages")).outcome
        assert [message["content"] for message in messages(outcome) if message["role"] == "tool"] == ["3"]


async def output_of(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode()


async def test_served_tools_are_listed_and_called(tmp_path: Path) -> None:
    (source,), (_, lines) = blocks("toolsets-serve.md"), blocks("toolsets-serve.md", "sh")
    async with serve_tools(tmp_path, source=source) as served:
        (tmp_path / "bank.py").write_text(source)
        addresses = {
            "localhost:50055": f"127.0.0.1:{served.grpc_port}",
            "http://localhost:9005/mcp": served.mcp_url,
            '"rollout tools': f'"{sys.executable} -m rollout_server.cli tools',
        }
        printed = []
        for written, real in addresses.items():
            lines = lines.replace(written, real)
        for line in lines.splitlines():
            if "npx" not in line:
                done = await command(*shlex.split(line)[1:], cwd=tmp_path)
                assert done.code == 0, done.err
                printed.append(done.out)
    over_grpc, over_mcp, deposit, balance = printed
    assert over_grpc == over_mcp
    assert "deposit" in over_grpc
    assert deposit == "5\n"
    assert json.loads(balance) == {"content": "0"}

"""Toolsets over the life of rollouts and servers: cancelled, drained, in groups, refused, and called by own loops."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx2
import pytest
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from osmosis.rollout.v1 import group_pb2, outcome_pb2, spec_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_server.tool import mcp

from tests.support import rogue_program
from tests.support.outside_agent import standing as standing_outside
from tests.support.processes import command
from tests.support.rogue_http import RogueHttp, rogue_http
from tests.support.tool_service import CounterService, serving
from tests.support.toolset_stand import Caught, marked, nothing_remains, standing, texts_of

HANG = [[("count", {"number": 1})], [("count", {"number": 1}), ("count", {"number": 2})]]


@pytest.fixture(autouse=True)
async def clean() -> AsyncIterator[None]:
    """Check that nothing is left of servers and sessions."""
    async with nothing_remains():
        yield


@pytest.fixture
async def rogue() -> AsyncIterator[RogueHttp]:
    async with rogue_http() as server:
        yield server


@pytest.mark.parametrize("how", ["cancel", "drain", "close"])
async def test_calls_that_run_end_with_their_rollouts(rogue: RogueHttp, tmp_path: Path, how: str) -> None:
    """In sessions over HTTP, of a program that ignores SIGTERM, and of a ToolService; and while a session is opened."""
    mark, service = str(tmp_path), CounterService(replies={"hang": []})
    program = mcp([sys.executable, "-SI", rogue_program.__file__, mark], timeout=None)
    do = [[("do", {"fault": "children, then hang"})]]
    async with serving(service) as url, standing(Caught("programs", program)) as stand:
        uids = [
            await stand.start("plain", HANG, tools=rogue.url("call: hang")),
            await stand.start("plain", HANG, tools=rogue.url("list: hang")),
            await stand.start("plain", HANG, tools=rogue.url("open: hang")),
            await stand.start("plain", [[("hang", {})]], tools=url),
            await stand.start("programs", do),
        ]
        await rogue.reached("call: hang", "tools/call")
        await rogue.reached("list: hang", "tools/list")
        await rogue.reached("open: hang", "initialize")
        await service.began.wait()
        while len(marked(mark)) < 5:  # noqa: ASYNC110 - the supervisor, the program and its three children
            await asyncio.sleep(0.01)
        if how == "close":
            return
        if how == "drain":
            await stand.caller.server.drain()
        else:
            await stand.cancel(*uids)
        for uid in uids:
            outcome = (await stand.caller.finished(uid)).outcome
            if how == "cancel":
                assert outcome.WhichOneof("end") == "cancellation"
            else:
                assert outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_INTERRUPTED
        await service.cancelled.wait()
        while marked(mark):  # noqa: ASYNC110 - they are not children of this process any more
            await asyncio.sleep(0.01)


async def test_a_group_has_the_tools_of_its_request(rogue: RogueHttp) -> None:
    async with standing() as stand:
        request = stand.request(
            "plain", [[("count", {"number": 3})], [("count", {"number": 4})]], tools=rogue.url("sound")
        )
        request.spec.group_id = "g"
        await stand.caller.stub.StartGroup(group_pb2.StartGroupRequest(spec=request.spec, count=4))
        watching = stand.caller.stub.WatchGroup(pb.WatchGroupRequest(group_id="g", view=pb.ROLLOUT_VIEW_FULL))
        outcomes = [item.outcome.rollout.outcome async for item in watching if item.HasField("outcome")]
        assert [texts_of(outcome) for outcome in outcomes] == [["3", "7"]] * 4


async def test_masked_trainers_are_refused(rogue: RogueHttp) -> None:
    async with standing() as stand:
        masked = spec_pb2.Target(url=stand.trainer.url, dialect=spec_pb2.DIALECT_HTTP_MASKED)
        for completions in (masked, spec_pb2.Target(url=stand.trainer.url)):
            with pytest.raises(grpc.aio.AioRpcError, match="cannot be used with an HTTP_MASKED trainer") as caught:
                await stand.start("plain", HANG, tools=rogue.url("sound"), completions=completions, token_mode=None)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not rogue.paths


@pytest.mark.parametrize("kind", ["mcp", "grpc"])
async def test_agents_with_a_loop_of_their_own_call_the_tools_of_the_request(rogue: RogueHttp, kind: str) -> None:
    service = CounterService()
    async with serving(service) as url, standing_outside() as stand:
        name, argument = ("count", "number") if kind == "mcp" else ("add", "amount")
        endpoints = [await stand.start(tools={"url": rogue.url("sound") if kind == "mcp" else url}) for _ in range(5)]

        async def work(number: int) -> list[str]:
            endpoint, texts = endpoints[number], list[str]()
            history = [{"role": "user", "content": "The task."}]
            async with (
                httpx2.AsyncClient(headers=endpoint.headers(), trust_env=False) as http,
                Client(
                    streamable_http_client(f"{stand.url}{endpoint.path}/mcp", http_client=http), cache=None
                ) as tools,
            ):
                assert [each.name for each in (await tools.list_tools()).tools] == [name]
                for _ in range(2):
                    history.append(await endpoint.chat(history))
                    texts += [(await tools.call_tool(name, {argument: number})).content[0].text]
                    history.append({"role": "user", "content": texts[-1]})
            assert (await endpoint.finish(reward=1.0))["reward"] == 1.0
            return texts

        results = await asyncio.gather(*map(work, range(5)))
        assert results == [[str(number), str(2 * number)] for number in range(5)]


async def test_an_own_loop_whose_tools_cannot_be_listed_ends(rogue: RogueHttp) -> None:
    async with standing_outside() as stand:
        broken, sound = [await stand.start(tools={"url": rogue.url(each)}) for each in ("list: reset", "sound")]
        outcome = await broken.outcome()
        assert (outcome["end"], outcome["category"], outcome["turn"]) == ("failure", "tool", 0)
        assert outcome["message"].startswith("tools: the rollout cannot offer the tools of spec.tools: ")
        body = {"model": "m", "messages": [{"role": "user", "content": "Hello."}]}
        assert (await broken.post("chat/completions", body)).status_code >= 400
        assert (await sound.finish(reward=1.0))["reward"] == 1.0


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        ('"http://127.0.0.1:9/mcp"', "agent 'lost' cannot offer the tools of http://127.0.0.1:9/mcp: "),
        ('["/nowhere/program"]', "No such file or directory"),
        (f"[{os.devnull!r}]", "Permission denied"),
        (f"[{sys.executable!r}, '-c', 'raise SystemExit(3)']", "it exited with status 3"),
    ],
)
async def test_a_server_does_not_start_with_a_dead_tool_server(tmp_path: Path, server: str, reason: str) -> None:
    source = f"from rollout_server import Agent, mcp\n\nclass Lost(Agent):\n    name = 'lost'\n    tools = (mcp({server}),)\n"
    (tmp_path / "agent.py").write_text(source)
    ports = ("--host", "127.0.0.1", "--http-port", "0", "--grpc-port", "0")
    ended = await command("serve", "agent.py:Lost", *ports, "--tokenizer", "toy=toy", cwd=tmp_path)
    assert ended.code == 1, ended
    assert reason in ended.err
    assert "agent 'lost' cannot offer the tools of" in ended.err
    assert "Traceback" not in ended.err

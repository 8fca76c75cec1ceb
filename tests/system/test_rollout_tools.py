"""The tools of a rollout as an MCP server at its endpoint, with the official SDK's client in both eras of the protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx2
import pytest
from mcp import MCPError
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from osmosis.rollout.v1 import agent_service_pb2 as pb
from osmosis.rollout.v1.agent_service_pb2_grpc import AgentServiceStub
from rollout_gateway.settings import GatewaySettings
from rollout_server import ExternalAgent, Image, Program, ToolContext, ToolError, tool
from rollout_server.runtime.capture.endpoint import MOST_CALLS
from rollout_server.runtime.capture.endpoint_tools import MOST_RESULTS
from rollout_server.runtime.tools.protocols import ToolUnavailable

from tests.support import tool_service
from tests.support.gateways import http_client, serving
from tests.support.outside_agent import (
    Endpoint,
    Stand,
    check_each_token_once,
    standing,
)
from tests.support.server_client import refusal, until

ERAS = pytest.mark.parametrize("mode", ["legacy", "auto", "2026-07-28"])
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
RUNNING: list[str] = []
ENDED: list[str] = []
GATES: list[asyncio.Event] = []


@tool
async def count(context: ToolContext, step: int = 1) -> int:
    """Add to the rollout's own number."""
    before = context.state.get("number", 0)
    await asyncio.sleep(0)
    context.state["number"] = before + step
    return before + step


@tool(idempotent=True)
async def fail(text: str) -> str:
    """Fail."""
    raise ToolError(text)


@tool(timeout=0.05)
async def sleep() -> str:
    """Take too long."""
    await asyncio.Event().wait()
    return ""


@tool
async def gated(context: ToolContext) -> str:
    """Return once the gate is open."""
    RUNNING.append(context.uid)
    try:
        await GATES[-1].wait()
    except asyncio.CancelledError:
        ENDED.append(context.uid)
        raise
    return "open"


@tool
async def draw() -> Image:
    """Draw a point."""
    return Image(PNG)


@tool
async def paint(context: ToolContext) -> Image:
    """Draw a picture of 3 MB."""
    RUNNING.append(context.uid)
    return Image(PNG + bytes(3_000_000))


TOOLS = (count, fail, sleep, gated, draw, paint)
CALLER = """
import json, os
from urllib.request import Request, urlopen

def post(url, body):
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    with urlopen(Request(url, json.dumps(body).encode(), headers)) as reply:
        return json.load(reply)

def mcp(method, **params):
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    return post(os.environ["ROLLOUT_MCP_URL"], body)["result"]

def user(text):
    return {"role": "user", "content": text}

history = [user("The task.")]
assert "count" in [each["name"] for each in mcp("tools/list")["tools"]]
for step in (5, 5, 0):
    reply = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"model": "m", "messages": history})
    history.append(reply["choices"][0]["message"])
    if step:
        history.append(user(mcp("tools/call", name="count", arguments={"step": step})["content"][0]["text"]))
"""


@tool
async def slow() -> str:
    """Take longer than the agent may be idle."""
    await asyncio.sleep(1.5)
    return "done"


class Missing:
    """A tool that cannot be run at all."""

    name, description, parameters_json_schema = "missing", "", '{"type": "object"}'

    async def run(self, arguments: Any) -> str:
        raise ToolUnavailable("its program is not there")


class Hasty(ExternalAgent):
    """Runs elsewhere, and is taken for dead soon."""

    name = "hasty"
    tools = (slow,)
    idle_seconds = 1.0


class Broken(ExternalAgent):
    """Runs elsewhere, with a tool that cannot be run."""

    name = "broken"
    tools = (Missing(),)


class Tooled(ExternalAgent):
    """Runs elsewhere, and has tools on the server."""

    name = "tooled"
    tools = TOOLS

    async def reward(self, run: Any) -> float:
        return float(run.state.get("number", 0))


@pytest.fixture(autouse=True)
async def fresh() -> None:
    GATES.append(asyncio.Event())
    RUNNING.clear()
    ENDED.clear()


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    """A server with an agent that runs elsewhere and has tools."""
    caller = Program([sys.executable, "-c", CALLER], name="caller", tools=TOOLS)
    async with standing(["One.", "Two.", "Three."], Tooled(), Hasty(), Broken(), caller) as opened:
        yield opened


@asynccontextmanager
async def client(endpoint: Endpoint, mode: str = "auto", **headers: str) -> AsyncIterator[Client]:
    """A client of the SDK with the rollout's key."""
    given = {**endpoint.headers(), **headers}
    url = f"{endpoint.stand.url}{endpoint.path}/mcp"
    async with (
        httpx2.AsyncClient(headers=given, verify=False, trust_env=False, timeout=60) as http,
        Client(streamable_http_client(url, http_client=http), mode=mode, cache=None) as opened,
    ):
        yield opened


def text(result: Any) -> str:
    """The text of a result."""
    (part,) = result.content
    return str(part.text)


async def post(endpoint: Endpoint, body: Any, **headers: str) -> Any:
    """Send a body, and return the response."""
    given = {**endpoint.headers(), "content-type": "application/json", **headers}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await endpoint.stand.http.post(f"{endpoint.path}/mcp", content=content, headers=given)


def request(method: str, **params: Any) -> dict[str, Any]:
    """A request of the era with a handshake."""
    return {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}


def modern(method: str, **params: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """A request of 2026-07-28, and its headers."""
    prefix = "io.modelcontextprotocol/"
    meta = {f"{prefix}protocolVersion": "2026-07-28", f"{prefix}clientCapabilities": {}}
    headers = {"mcp-protocol-version": "2026-07-28", "mcp-method": method}
    return request(method, _meta=meta, **params), headers | ({"mcp-name": params["name"]} if "name" in params else {})


@asynccontextmanager
async def rpcs(stand: Stand) -> AsyncIterator[Any]:
    """A stub of AgentService."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stand.server.grpc_port}") as channel:
        yield AgentServiceStub(channel)


def metadata(endpoint: Endpoint) -> tuple[tuple[str, str], ...]:
    """The metadata of a call with the rollout's key."""
    return tuple(endpoint.headers().items())


async def running(uid: str, times: int = 1) -> None:
    """Wait until the gated tool runs for the rollout."""

    async def runs() -> bool:
        return RUNNING.count(uid) >= times

    await until(runs)


@ERAS
async def test_tools_are_listed_and_called(stand: Stand, mode: str) -> None:
    endpoint = await stand.start("tooled")
    async with client(endpoint, mode) as mcp:
        assert mcp.protocol_version == ("2025-11-25" if mode == "legacy" else "2026-07-28")
        found = {each.name: each for each in (await mcp.list_tools()).tools}
        assert [*found] == [each.name for each in TOOLS]
        assert found["count"].description == "Add to the rollout's own number."
        assert found["count"].input_schema["properties"].keys() == {"step"}
        assert found["fail"].annotations is not None
        assert found["fail"].annotations.idempotent_hint is True
        assert found["count"].annotations is None
        assert [text(await mcp.call_tool("count", given)) for given in ({}, {"step": 4})] == ["1", "5"]
        image = (await mcp.call_tool("draw")).content[0]
        assert (image.type, base64.b64decode(image.data), image.mime_type) == ("image", PNG, "image/png")
    assert (await endpoint.finish())["reward"] == 5.0


async def test_tools_of_a_service_may_be_repeated_only_if_it_says_so(stand: Stand) -> None:
    service = tool_service.CounterService(replies={"look": []}, idempotent=("look",))
    async with tool_service.serving(service) as url:
        endpoint = await stand.start("tooled", tools={"url": url, "dialect": "grpc"})
        async with rpcs(stand) as agents:
            listed = await agents.ListRolloutTools(
                pb.ListRolloutToolsRequest(uid=endpoint.uid), metadata=metadata(endpoint)
            )
        await endpoint.finish(reward=0.0)
    assert [each.name for each in listed.tools][-2:] == ["add", "look"]
    assert listed.idempotent_tools == ["fail", "look"]


@ERAS
async def test_errors_of_a_tool_are_results(stand: Stand, mode: str) -> None:
    endpoint = await stand.start("tooled")
    async with client(endpoint, mode) as mcp:
        for name, arguments, shown in (
            ("fail", {"text": "No such file"}, "Error: No such file"),
            ("sleep", {}, "Error: sleep took longer than 0.05 s"),
            ("count", {"step": "five"}, "Error: Invalid arguments for count: "),
        ):
            result = await mcp.call_tool(name, arguments)
            assert result.is_error
            assert text(result).startswith(shown)
        with pytest.raises(MCPError, match="the rollout has no tool 'rm'; there are count, fail, sleep") as caught:
            await mcp.call_tool("rm", {})
        assert caught.value.code == -32602
        assert text(await mcp.call_tool("count", {})) == "1"
    lines = stand.server.exposition().decode().splitlines()
    counts = [line for line in lines if line.startswith("rollout_tool") and "_count{" in line and "fail" in line]
    assert any('tool="fail"' in line and line.endswith(" 1.0") for line in counts), counts
    await endpoint.finish(reward=0.0)


@ERAS
async def test_another_rollouts_key_is_refused(stand: Stand, mode: str) -> None:
    mine, other = [await stand.start("tooled") for _ in range(2)]
    with pytest.RaisesGroup(pytest.RaisesExc(MCPError, match="needs the key of this rollout"), flatten_subgroups=True):
        async with client(mine, mode, authorization=f"Bearer {other.key}") as mcp:
            await mcp.list_tools()
    reply = await post(mine, request("tools/call", name="count"), authorization=f"Bearer {other.key}")
    assert reply.status_code == 403
    assert reply.json()["error"]["data"]["reason"] == "MODEL_KEY_INVALID"
    assert (await post(mine, request("tools/list"), authorization="")).status_code == 403
    for each in (mine, other):
        assert (await each.finish())["reward"] == 0.0


async def test_rollouts_at_once_have_their_own_state(stand: Stand) -> None:
    endpoints = [await stand.start("tooled") for _ in range(20)]

    async def work(number: int, endpoint: Endpoint) -> float:
        async with client(endpoint, ("legacy", "auto")[number % 2]) as mcp:
            for _ in range(5):
                await mcp.call_tool("count", {"step": number})
        return float((await endpoint.finish())["reward"])

    rewards = await asyncio.gather(*(work(number, endpoint) for number, endpoint in enumerate(endpoints)))
    assert rewards == [5.0 * number for number in range(20)]


async def test_a_program_puts_results_into_its_history(stand: Stand) -> None:
    """What the samples have does not depend on where the texts of the user come from."""
    called = (await stand.http.post("/v1/rollouts", json=_program_request(stand))).json()
    outcome = await Endpoint(stand, called["rollout"]["uid"], "", "").outcome()
    assert (outcome["end"], outcome["reason"]) == ("stop", "stop"), outcome
    assert [message["content"] for message in outcome["messages"]] == ["The task.", "One.", "5", "Two.", "10", "Three."]
    assert outcome["metrics"]["tool_calls"] == 0
    (sample,) = outcome["samples"]
    check_each_token_once(outcome, stand.seen)
    plain = await stand.start("tooled")
    history: list[dict[str, Any]] = [{"role": "user", "content": "The task."}]
    stand.engine.model.seen.clear()
    for said in ("5", "10", ""):
        history.append(await plain.chat(history))
        history.append({"role": "user", "content": said})
    (same,) = (await plain.finish(reward=0.0))["samples"]
    shown = ("prompt_ids", "response_ids", "response_mask")
    assert [sample[name] for name in shown] == [same[name] for name in shown]


def _program_request(stand: Stand) -> dict[str, Any]:
    return {
        "rollout_id": "program",
        "agent": "caller",
        "messages": [{"role": "user", "content": "The task."}],
        "completions": {"url": stand.engine.url, "dialect": "vllm", "model": "m"},
        "tokenizer": {"name": "toy"},
        "token_mode": "tokens",
    }


@ERAS
async def test_the_end_of_the_rollout_cancels_calls(stand: Stand, mode: str) -> None:
    endpoint = await stand.start("tooled")
    async with client(endpoint, mode) as mcp:
        calling = asyncio.create_task(mcp.call_tool("gated", {}))
        await running(endpoint.uid)
        reply = await stand.http.post("/v1/rollouts/cancel", json={"uids": [endpoint.uid]})
        assert reply.status_code == 200, reply.text
        with pytest.raises(MCPError, match=r"the rollout has ended \(cancelled\)") as caught:
            await calling
        assert caught.value.error.data == {"reason": "ROLLOUT_OVER"}
        assert (await endpoint.outcome())["end"] == "cancellation"
        with pytest.raises(MCPError, match="the rollout has ended"):
            await mcp.list_tools()
    assert [endpoint.uid] == ENDED
    assert not [task for task in asyncio.all_tasks() if "gated" in task.get_name()]


@pytest.mark.parametrize("key", ["", "k"])
async def test_finish_cancels_calls(stand: Stand, key: str) -> None:
    """Also one whose caller has left."""
    endpoint = await stand.start("tooled")
    async with rpcs(stand) as agents:
        call = pb.CallRolloutToolRequest(uid=endpoint.uid, name="gated", repeat_key=key)
        calling = agents.CallRolloutTool(call, metadata=metadata(endpoint))
        await running(endpoint.uid)
        if key:
            calling.cancel()
        outcome = await endpoint.finish()
        assert outcome["reward"] == 0.0
        if not key:
            assert (await refusal(calling)).reason == "ROLLOUT_OVER"
    assert [endpoint.uid] == ENDED


async def test_a_caller_that_leaves_cancels_its_call(stand: Stand) -> None:
    endpoint = await stand.start("tooled")
    for how in ("http", "grpc"):
        async with rpcs(stand) as agents:
            call = pb.CallRolloutToolRequest(uid=endpoint.uid, name="gated")
            calling = (
                asyncio.ensure_future(post(endpoint, request("tools/call", name="gated")))
                if how == "http"
                else agents.CallRolloutTool(call, metadata=metadata(endpoint))
            )
            await running(endpoint.uid, 1 + len(ENDED))
            ends = 1 + len(ENDED)
            calling.cancel()

            async def ended(ends: int = ends) -> bool:
                return len(ENDED) == ends

            await until(ended)
    await endpoint.finish()


async def test_a_repeat_key_makes_a_call_safe_to_repeat(stand: Stand) -> None:
    endpoint = await stand.start("tooled")
    async with rpcs(stand) as agents:

        def call(name: str, key: str, arguments: str = "") -> Any:
            request = pb.CallRolloutToolRequest(uid=endpoint.uid, name=name, repeat_key=key, arguments_json=arguments)
            return agents.CallRolloutTool(request, metadata=metadata(endpoint))

        first = [await call("count", "a") for _ in range(3)]
        assert [each.parts[0].text for each in first] == ["1", "1", "1"]
        assert (await call("count", "b")).parts[0].text == "2"
        wrong = await refusal(call("count", "a", '{"step": 2}'))
        assert (wrong.code, [*wrong.fields]) == (grpc.StatusCode.INVALID_ARGUMENT, ["repeat_key"])
        assert (await refusal(call("count", "k" * 257))).fields.keys() == {"repeat_key"}
        # A running call goes on without its caller, and a repeated one joins it.
        leaving = call("gated", "c")
        await running(endpoint.uid)
        leaving.cancel()
        joining = [asyncio.ensure_future(call("gated", "c")) for _ in range(2)]
        assert (await call("count", "d")).parts[0].text == "3"
        GATES[-1].set()
        assert [each.parts[0].text for each in await asyncio.gather(*joining)] == ["open", "open"]
        assert ([endpoint.uid], []) == (RUNNING, ENDED)
        # The oldest results are dropped.
        for number in range(MOST_RESULTS):
            await call("count", f"n{number}")
        assert (await call("count", "a")).parts[0].text == str(4 + MOST_RESULTS)
    async with client(endpoint, "legacy", **{"idempotency-key": "same"}) as mcp:
        assert len({text(await mcp.call_tool("count", {})) for _ in range(2)}) == 1
    await endpoint.finish()


async def test_the_images_of_results_count_when_old_results_are_dropped(stand: Stand) -> None:
    endpoint = await stand.start("tooled")
    async with rpcs(stand) as agents:

        async def call(name: str, key: str) -> str:
            request = pb.CallRolloutToolRequest(uid=endpoint.uid, name=name, repeat_key=key)
            result = await agents.CallRolloutTool(request, metadata=metadata(endpoint))
            return str(result.parts[0].text)

        assert await call("count", "a") == "1"
        for key in "bcde":  # 16 million characters
            await call("paint", key)
        assert await call("count", "a") == "1"
        await call("paint", "f")
        assert await call("count", "a") == "2"
        await call("paint", "f")
    assert len(RUNNING) == 5
    await endpoint.finish()


async def test_too_many_calls_are_refused(stand: Stand) -> None:
    endpoint, other = await stand.start("tooled"), await stand.start("tooled")
    async with rpcs(stand) as agents:
        call = pb.CallRolloutToolRequest(uid=endpoint.uid, name="gated")
        open_calls = [agents.CallRolloutTool(call, metadata=metadata(endpoint)) for _ in range(MOST_CALLS)]
        await running(endpoint.uid, MOST_CALLS)
        refused = await refusal(agents.CallRolloutTool(call, metadata=metadata(endpoint)))
        assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")
        assert refused.retry_after == 1.0
        reply = await post(endpoint, request("tools/call", name="count"))
        assert reply.status_code == 200
        assert reply.json()["error"]["data"] == {"reason": "TOO_MANY_CALLS", "retryAfter": 1}
        async with client(other) as mcp:
            assert text(await mcp.call_tool("count", {})) == "1"
        assert (await stand.http.get(f"/v1/rollouts/{endpoint.uid}")).json()["state"] == "running"
        GATES[-1].set()
        assert {(await each).parts[0].text for each in open_calls} == {"open"}
        async with client(endpoint) as mcp:
            assert text(await mcp.call_tool("count", {})) == "1"
    await asyncio.gather(endpoint.finish(), other.finish())


async def test_a_tool_call_keeps_an_idle_rollout_alive(stand: Stand) -> None:
    """The time without calls begins once a tool has returned."""
    endpoint = await stand.start("hasty")
    calling = asyncio.create_task(post(endpoint, request("tools/call", name="slow")))
    assert (await calling).json()["result"]["content"][0]["text"] == "done"
    assert (await endpoint.finish(reward=1.0))["reward"] == 1.0


async def test_a_tool_that_cannot_be_run_ends_the_rollout(stand: Stand) -> None:
    endpoint = await stand.start("broken")
    reply = await post(endpoint, request("tools/call", name="missing"))
    assert reply.json()["error"]["data"] == {"reason": "ROLLOUT_OVER"}
    outcome = await endpoint.outcome()
    assert (outcome["end"], outcome["failure_class"]) == ("failure", "tool"), outcome


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (b"{", -32700, "not valid JSON"),
        (b"[]", -32700, "must be a JSON object"),
        ({"jsonrpc": "2.0", "id": None, "method": "ping"}, -32600, "one JSON-RPC 2.0 request"),
        ({"jsonrpc": "2.0", "id": 1, "result": {}}, -32600, "one JSON-RPC 2.0 request"),
        ({"jsonrpc": "1.0", "id": 1, "method": "ping"}, -32600, "one JSON-RPC 2.0 request"),
        ({"jsonrpc": "2.0", "id": 1, "method": "ping", "params": []}, -32600, "params must be an object"),
        (b'{"a":' * 300 + b"1" + b"}" * 300, -32602, "nested deeper"),
    ],
)
async def test_bodies_that_are_no_message(stand: Stand, body: Any, code: int, said: str) -> None:
    endpoint = await stand.start("tooled")
    reply = await post(endpoint, body)
    assert reply.status_code == 400
    assert reply.json()["id"] is None
    assert (reply.json()["error"]["code"], said in reply.json()["error"]["message"]) == (code, True), reply.text
    await endpoint.finish()


async def test_requests_that_are_refused(stand: Stand) -> None:
    endpoint = await stand.start("tooled")
    for method, params, code, said in (
        ("tools/call", {}, -32602, "params.name must be"),
        ("tools/call", {"name": "count", "arguments": [1]}, -32602, "params.arguments: a JSON object is needed"),
        ("tools/call", {"name": "count", "arguments": {"step": "1" * (4 << 20)}}, -32602, "at most 4,194,304"),
        ("resources/list", {}, -32601, "no method 'resources/list'"),
        ("server/discover", {}, -32601, "no method"),
    ):
        reply = await post(endpoint, request(method, **params))
        assert (reply.status_code, reply.json()["id"]) == (200, 7)
        error = reply.json()["error"]
        assert (error["code"], said in error["message"]) == (code, True), error
    for method in ("GET", "DELETE"):
        reply = await stand.http.request(method, f"{endpoint.path}/mcp", headers=endpoint.headers())
        assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
    for name in ("notifications/initialized", "notifications/cancelled"):
        reply = await post(endpoint, {"jsonrpc": "2.0", "method": name})
        assert (reply.status_code, reply.content) == (202, b"")
    assert (await post(endpoint, request("ping"))).json() == {"jsonrpc": "2.0", "id": 7, "result": {}}
    answered = await post(endpoint, request("initialize", protocolVersion="2031-01-01"), origin="https://elsewhere")
    assert answered.json()["result"]["protocolVersion"] == "2025-11-25"
    assert "mcp-session-id" not in answered.headers
    await endpoint.finish()


async def test_a_body_that_is_too_large(stand: Stand) -> None:
    endpoint = await stand.start("tooled")
    bounds = GatewaySettings(max_body_bytes=1000)
    async with (
        serving(f"127.0.0.1:{stand.server.grpc_port}", bounds) as (host, port),
        http_client(f"http://{host}:{port}") as http,
    ):
        body = request("tools/call", name="count", arguments={"step": "1" * 4000})
        reply = await http.post(f"{endpoint.path}/mcp", json=body, headers=endpoint.headers())
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, -32600), reply.text
        reply = await http.post(f"{endpoint.path}/mcp", json=request("ping"), headers=endpoint.headers())
        assert reply.json()["result"] == {}
    await endpoint.finish()


async def test_modern_requests_name_themselves(stand: Stand) -> None:
    endpoint = await stand.start("tooled")
    body, headers = modern("tools/call", name="count")
    encoded = {"mcp-name": f"=?base64?{base64.b64encode(b'count').decode()}?="}
    for more in ({}, encoded):
        assert (await post(endpoint, body, **(headers | more))).json()["result"]["resultType"] == "complete"
    listing = (await post(endpoint, *modern("tools/list")[:1], **modern("tools/list")[1])).json()["result"]
    assert (listing["ttlMs"], listing["cacheScope"]) == (300_000, "private")
    meta = body["params"]["_meta"]
    version = "io.modelcontextprotocol/protocolVersion"
    for sent, changed, status, code in (
        (body, {"mcp-name": "fail"}, 400, -32020),
        (body, {"mcp-name": "=?base64?!?="}, 400, -32020),
        (body, {"mcp-method": "tools/list"}, 400, -32020),
        (body, {"mcp-protocol-version": "2027-01-01"}, 400, -32020),
        (request("tools/call", name="count"), {}, 400, -32602),
        (request("ping", _meta=meta), {"mcp-method": "ping"}, 404, -32601),
    ):
        reply = await post(endpoint, sent, **(headers | changed))
        assert (reply.status_code, reply.json()["error"]["code"]) == (status, code), reply.text
    later = request("tools/list", _meta=meta | {version: "2027-01-01"})
    reply = await post(endpoint, later, **{"mcp-protocol-version": "2027-01-01", "mcp-method": "tools/list"})
    assert reply.status_code == 400
    assert reply.json()["error"]["data"] == {"supported": ["2026-07-28"], "requested": "2027-01-01"}
    async with client(endpoint) as mcp:
        assert text(await mcp.call_tool("count", {})) == "3"
    await endpoint.finish()

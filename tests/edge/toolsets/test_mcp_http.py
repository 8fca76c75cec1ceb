"""MCP servers over HTTP: both eras of the protocol, state, wrong responses and target rules. Nothing of a session remains."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from mcp_types.version import LATEST_HANDSHAKE_VERSION
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from rollout_server.core.spec import Dialect, Target
from rollout_server.edge.targets.resolver import CheckedLookup
from rollout_server.edge.targets.rules import TargetRules
from rollout_server.edge.toolsets.mcp import connector as mcp_connector
from rollout_server.edge.toolsets.mcp.connector import McpConnector
from rollout_server.runtime.errors import ToolError
from rollout_server.runtime.tools.protocols import ToolFailed, ToolsetLost
from rollout_server.runtime.tools.toolset import RequestedToolset, ToolsetCaller
from rollout_server.tool import mcp

from tests.edge.toolsets.sessions import (
    CALLER,
    SMALL,
    call,
    connector,
    fails,
    faulty,
    http_counter,
    not_opened,
    nothing_remains,
    text,
)
from tests.support.certificates import Authority
from tests.support.mcp_faulty_http import faulty_mcp
from tests.support.toy_model import until


def requested(url: str) -> RequestedToolset:
    return RequestedToolset(Target(url, Dialect.HTTP_PLAIN))


@pytest.fixture(autouse=True)
async def clean() -> AsyncIterator[None]:
    async with connector().connect(faulty("none"), CALLER):  # imports the SDK, which keeps some descriptors
        pass
    async with nothing_remains():
        yield


def of_era(era: str, url: str) -> McpConnector:
    """A connector that speaks the newer protocol if the server does, or the one with a handshake."""
    connection = connector()
    if era == "handshake":
        connection._handshake.add(url)
    return connection


@pytest.mark.parametrize("era", ["handshake", "newest"])
async def test_sessions_at_the_same_time_share_no_state(era: str) -> None:
    async with http_counter() as url:

        async def one(number: int) -> list[str]:
            connection = of_era(era, url)
            async with connection.connect(mcp(url), ToolsetCaller(f"u{number}")) as session:
                tool = "add_here" if era == "handshake" else "add"
                return [(await text(session, tool, f"u{number}", number=number)).split("=")[-1] for _ in range(3)]

        results = await asyncio.gather(*(one(number) for number in range(50)))
        assert results == [[str(number), str(2 * number), str(3 * number)] for number in range(50)]


async def test_calls_of_a_shared_session_keep_their_rollouts_apart() -> None:
    async with http_counter() as url, connector().connect(mcp(url), ToolsetCaller()) as session:
        results = await asyncio.gather(*(text(session, "add", f"u{number}", number=number) for number in range(50)))
        assert results == [f"u{number}={number}" for number in range(50)]


@pytest.mark.parametrize("era", ["handshake", "newest"])
async def test_a_cancelled_call_stops_the_handler_and_leaves_the_session_usable(era: str) -> None:
    async with http_counter() as url, of_era(era, url).connect(mcp(url), CALLER) as session:
        before = int(await text(session, "cancelled"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await session.call(call("wait", seconds=100))
        while int(await text(session, "cancelled")) == before:  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("era", ["handshake", "newest"])
async def test_the_call_has_uid_key_and_trace(era: str) -> None:
    async with http_counter() as url, of_era(era, url).connect(mcp(url), CALLER) as session:
        with TracerProvider().get_tracer("test").start_as_current_span("call") as span:
            sent = await text(session, "meta")
        assert '"osmosis.rollout/uid": "u1"' in sent
        assert '"osmosis.rollout/call-key": "u1/meta"' in sent
        assert f"00-{trace.format_trace_id(span.get_span_context().trace_id)}-" in sent
        assert session.has_handshake == (era == "handshake")  # type: ignore[attr-defined]


async def test_hints_of_the_server_make_tools_idempotent() -> None:
    async with http_counter() as url, connector().connect(mcp(url), CALLER) as session:
        tools = {tool.name: tool for tool in await session.list_tools()}
        assert {name for name, tool in tools.items() if tool.idempotent} == {"meta", "cancelled"}
        assert tools["add"].description == "Add to the counter of the rollout."
        assert '"number"' in tools["add"].parameters_json_schema


async def test_content_of_all_kinds_becomes_parts() -> None:
    async with http_counter() as url, connector().connect(mcp(url), CALLER) as session:
        content = await session.call(call("media"))
        assert not isinstance(content, str)
        texts = [part.get("text") or str(part["image_url"])[:38] for part in content]
        image = "{'url': 'data:image/png;base64,iVBORw0"
        notes = "[resource notes, file:///notes.txt: all notes]"
        blob = "[resource file:///c.bin, of an unknown type, 3 bytes]"
        assert texts == ["first", image, "[audio, audio/wav, 3 bytes]", notes, "inside", image, blob]


async def test_the_error_of_a_tool_is_a_tool_error() -> None:
    async with http_counter() as url, connector().connect(mcp(url), CALLER) as session:
        assert isinstance(await fails(session, "fail", text="no"), ToolError)
        assert isinstance(await fails(session, "add", number="many"), ToolError)


FLOOD = "its response has more than 1,000,000 bytes"
BROKE = "the connection broke before its response was complete"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("reset", BROKE),
        ("cut body", BROKE),
        ("no http", BROKE),
        ("flood body", FLOOD),
        ("flood comments", FLOOD),
        ("flood event", FLOOD),
        ("flood ids", FLOOD),
        ("flood 1xx", FLOOD),
        ("flood headers", BROKE),
        ("bomb", "its response is compressed, which was not asked for"),
        ("html", "Unexpected content type: text/html"),
        ("not json", "the result of call is not a JSON-RPC message"),
        ("status", "it responded with HTTP status 500"),
        ("unauthorized", "it responded with HTTP status 401"),
        ("redirect", "a redirect to http://169.254.169.254/latest, which is not followed"),
        ("accepted", "server answered a request with 202 Accepted"),
        ("empty stream", "SSE stream ended without a response"),
    ],
)
async def test_a_broken_response_fails_one_call_with_its_reason(fault: str, reason: str) -> None:
    async with faulty_mcp(fault) as server, connector(SMALL).connect(mcp(server.url), CALLER) as session:
        error = await fails(session)
        assert isinstance(error, ToolFailed)
        assert not isinstance(error, ToolsetLost)
        assert reason in str(error)
        assert "secret" not in str(error)
        server.fault = ""
        assert await text(session, "call") == "fine"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("flood events", "it sent more than 10,000 messages that nobody asked for"),
        ("forgot session", "it no longer knows the session: it restarted, or ended the session"),
    ],
)
async def test_a_session_that_ended_is_lost(fault: str, reason: str) -> None:
    async with faulty_mcp(fault) as server, connector().connect(mcp(server.url), CALLER) as session:
        error = await fails(session)
        assert isinstance(error, ToolsetLost)
        assert reason in str(error)


async def test_a_response_after_the_end_of_the_session_harms_nobody() -> None:
    async with faulty_mcp("late") as server, connector().connect(mcp(server.url), CALLER) as session:
        late = asyncio.create_task(fails(session))
        await until(lambda: "tools/call" in server.methods())
        server.fault = "flood events"
        assert isinstance(await fails(session), ToolsetLost)
        assert isinstance(await late, ToolsetLost)
        server.released.set()
        await asyncio.sleep(0.1)  # the task that opened the session would be cancelled here
        assert isinstance(await fails(session), ToolsetLost)


async def test_a_server_that_hangs_does_not_block_other_calls() -> None:
    async with faulty_mcp("hang") as server, connector().connect(mcp(server.url), CALLER) as session:
        hanging = asyncio.create_task(session.call(call("call")))
        await until(lambda: "tools/call" in server.methods())
        server.fault = ""
        assert await text(session, "call") == "fine"
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        await until(lambda: "notifications/cancelled" in server.methods())


async def test_a_session_sends_its_uid_and_bearer_and_ends_at_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_TEST", "letmein")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    async with faulty_mcp("") as server:
        async with connector().connect(mcp(server.url, bearer_variable="TOKEN_OF_TEST"), CALLER) as session:
            await text(session, "call")
        sent = [headers for _, headers in server.seen]
        assert {each["authorization"] for each in sent} == {"Bearer letmein"}
        assert {each["x-rollout-uid"] for each in sent} == {"u1"}
        assert server.methods()[-1] == "DELETE"
        assert "GET" not in server.methods()


async def test_a_server_without_the_newer_protocol_is_asked_for_it_once() -> None:
    async with faulty_mcp("") as server:
        connection = connector()
        for _ in range(2):
            async with connection.connect(mcp(server.url), CALLER):
                pass
        assert server.methods().count("server/discover") == 1
        assert [m for m, _ in server.seen if m.get("method") == "initialize"][-1]["params"]["protocolVersion"] == (
            LATEST_HANDSHAKE_VERSION
        )


async def test_sessions_that_are_opened_in_parallel_do_not_ask_again_either() -> None:
    async with faulty_mcp("") as server:
        connection = connector()

        async def opened() -> None:
            async with connection.connect(mcp(server.url), CALLER):
                pass

        await opened()
        await asyncio.gather(*(opened() for _ in range(8)))
        assert server.methods().count("initialize") == 9
        assert server.methods().count("server/discover") == 1


async def test_a_server_that_no_longer_opens_is_asked_for_the_newer_protocol_again() -> None:
    async with faulty_mcp("") as server:
        url, connection = server.url, connector()
        async with connection.connect(mcp(url), CALLER):
            pass
    await not_opened(connection, mcp(url))
    async with faulty_mcp("", port=server.port) as restarted, connection.connect(mcp(url), CALLER):
        assert restarted.methods().count("server/discover") == 1


async def test_the_servers_that_requests_name_are_remembered_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_connector, "_MOST_NAMES", 1)
    async with faulty_mcp("") as server:
        connection = connector()
        one, other, own = requested(server.url), requested(f"{server.url}/other"), mcp(f"{server.url}/own")
        for source, asked in ((one, 1), (one, 1), (other, 2), (other, 3), (own, 4), (own, 4), (one, 4)):
            async with connection.connect(source, CALLER):
                assert server.methods().count("server/discover") == asked


async def test_a_missing_bearer_token_names_its_variable() -> None:
    error = await not_opened(connector(), mcp("http://127.0.0.1:9/mcp", bearer_variable="NO_SUCH_VARIABLE"))
    assert "set the environment variable NO_SUCH_VARIABLE" in str(error)


async def test_a_server_that_is_down_is_not_opened() -> None:
    error = await not_opened(connector(), mcp("http://127.0.0.1:9/mcp"))
    assert isinstance(error, ToolFailed)
    assert "could not be opened: it could not be reached" in str(error)


async def test_a_url_that_is_not_that_of_an_mcp_server_is_not_opened() -> None:
    async with http_counter() as url:
        error = await not_opened(connector(), mcp(url.replace("/mcp", "/elsewhere")))
        assert str(error).endswith("could not be opened: it responded with HTTP status 404")


async def test_targets_of_requests_obey_the_rules() -> None:
    async with faulty_mcp("") as server:
        rules = TargetRules.parse("*.example", loopback=False)
        named = server.url.replace("127.0.0.1", "tools.example")
        for url in (server.url, named):
            error = await not_opened(connector(rules=rules, tools_example=["127.0.0.1"]), requested(url))
            assert "loopback" in str(error)
        assert server.seen == []
        async with connector(rules=rules).connect(
            mcp(server.url), CALLER
        ) as session:  # the author's own is not restricted
            assert await text(session, "call") == "fine"


async def test_the_checked_address_is_used_and_the_name_kept() -> None:
    async with faulty_mcp("") as server:
        named = server.url.replace("127.0.0.1", "tools.example")
        connection = connector(tools_example=["127.0.0.1"])
        async with connection.connect(requested(named), ToolsetCaller("u1", bearer="of-the-request")) as session:
            assert await text(session, "call") == "fine"
        assert {headers["host"] for _, headers in server.seen} == {f"tools.example:{server.port}"}
        assert {headers["authorization"] for _, headers in server.seen} == {"Bearer of-the-request"}


async def test_https_is_verified_with_the_name_and_the_given_authority(tmp_path: Path) -> None:
    authority = Authority()
    pair = authority.put(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pair.cert, pair.key)
    async with faulty_mcp("", tls) as server:
        url = server.url.replace("http://127.0.0.1", "https://localhost")
        lookup = CheckedLookup(TargetRules())
        trusting = McpConnector(lookup, str(authority.put_ca(tmp_path)))
        async with trusting.connect(requested(url), CALLER) as session:
            assert await text(session, "call") == "fine"
        error = await not_opened(McpConnector(lookup), requested(url))
        assert "CERTIFICATE_VERIFY_FAILED" in str(error)
        await lookup.close()

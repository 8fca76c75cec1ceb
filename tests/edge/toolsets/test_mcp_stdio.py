"""MCP servers that are programs: state, ends, floods and wrong messages. Nothing of a program remains."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import pytest
from rollout_server.edge.toolsets.mcp.limits import McpLimits
from rollout_server.runtime.errors import ToolError
from rollout_server.runtime.tools.protocols import ToolFailed, ToolsetLost
from rollout_server.runtime.tools.toolset import ToolsetCaller
from rollout_server.tool import mcp

from tests.edge.toolsets.sessions import (
    CALLER,
    SMALL,
    call,
    connector,
    fails,
    faulty,
    not_opened,
    nothing_remains,
    stdio_counter,
    text,
)
from tests.support import mcp_faulty


@pytest.fixture(autouse=True)
async def clean() -> AsyncIterator[None]:
    async with connector().connect(faulty("none"), CALLER):  # imports the SDK, which keeps some descriptors
        pass
    async with nothing_remains():
        yield


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("exit", "is gone: it exited with status 3"),
        ("endless line", "is gone: it wrote a line of more than 1,000,000 bytes"),
        ("endless lines", "is gone: it sent more than 10,000 messages that nobody asked for"),
        ("notifications", "is gone: it sent more than 10,000 messages that nobody asked for"),
        ("requests", "is gone: it sent more than 10,000 messages that nobody asked for"),
    ],
)
async def test_a_program_that_ends_or_floods_ends_the_session(fault: str, reason: str) -> None:
    async with connector(SMALL).connect(faulty(fault), CALLER) as session:
        error = await fails(session)
        assert isinstance(error, ToolsetLost)
        assert reason in str(error)
        assert isinstance(await fails(session), ToolsetLost)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (
            "wrong type",
            "the result of call does not have the form that MCP defines: content: Input should be a valid list",
        ),
        ("wrong block", "the result of call does not have the form that MCP defines: content.0."),
        ("no content", "the result of call does not have the form that MCP defines: content: Field required"),
        ("bad image", "its result has an image that is not base64"),
        ("not an image", "its result has an image whose MIME type is not that of an image"),
        ("json-rpc error", "error -32603: broken inside"),
    ],
)
async def test_a_wrong_result_fails_the_call_and_not_the_session(fault: str, reason: str) -> None:
    async with connector().connect(faulty(fault), CALLER) as session:
        for _ in range(2):
            error = await fails(session)
            assert isinstance(error, ToolFailed)
            assert not isinstance(error, ToolsetLost)
            assert reason in str(error)


async def test_the_error_of_a_tool_is_its_own_text() -> None:
    async with connector().connect(faulty("error"), CALLER) as session:
        error = await fails(session)
        assert (type(error), str(error)) == (ToolError, "no such file")


async def test_structured_content_stands_in_for_missing_content() -> None:
    async with connector().connect(faulty("structured"), CALLER) as session:
        assert await text(session, "call") == '{"n": 1}'


async def test_lines_that_are_no_messages_are_skipped() -> None:
    async with connector().connect(faulty("noise"), CALLER) as session:
        assert await text(session, "call") == "fine"


async def test_a_server_that_asks_for_input_is_refused() -> None:
    async with connector().connect(faulty("asks"), CALLER) as session:
        assert "Elicitation not supported" in await text(session, "call")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("many tools", "it lists 10,000 tools at once; at most 2,000 are accepted"),
        ("endless pages", "its list of tools does not end"),
        ("same page", "its list of tools does not end: page 3 names a further one"),
        ("large schemas", "it lists more than 2,000 tools or 4,194,304 bytes of them"),
        ("tools of wrong type", "its list of tools does not have the form that MCP defines: tools.0.inputSchema"),
        ("tools are a text", "its list of tools does not have the form that MCP defines: tools"),
    ],
)
async def test_a_wrong_list_of_tools_fails(fault: str, reason: str) -> None:
    async with connector().connect(faulty(fault), CALLER) as session:
        with pytest.raises(ToolFailed, match="MCP server") as failed:
            await session.list_tools()
        assert reason in str(failed.value)
        assert "error -" not in str(failed.value)
        assert await text(session, "call") == "fine"


async def test_an_empty_page_adds_nothing_to_the_size_of_a_list() -> None:
    async with connector(McpLimits(list_bytes=1000)).connect(faulty("empty page"), CALLER) as session:
        assert [tool.name for tool in await session.list_tools()] == ["call"]


async def test_results_are_not_checked_against_a_schema_of_the_server() -> None:
    async with connector().connect(faulty("output schema"), CALLER) as session:
        assert [tool.name for tool in await session.list_tools()] == ["call"]
        assert await text(session, "call") == "fine"


async def test_a_call_that_hangs_is_cancelled_and_its_program_ended() -> None:
    async with connector().connect(faulty("hang"), CALLER) as session:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await session.call(call("call"))
        assert [tool.name for tool in await session.list_tools()] == ["call"]


@pytest.mark.parametrize("fault", ["silent", "hang"])
async def test_opening_can_be_cancelled(fault: str) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5), connector().connect(faulty(fault), CALLER) as session:
            await session.call(call("call"))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (faulty("garbage"), "it sent more than 10,000 messages that nobody asked for"),
        (faulty("version"), "Unsupported protocol version"),
        (mcp(["/no/such/program"]), "it could not be executed: [Errno 2] No such file or directory"),
        (mcp(["/bin/sh", "-c", "echo no key >&2; exit 2"]), "it exited with status 2"),
        (mcp(["/bin/true"], directory="/no/such/folder"), "it could not be started: No such file or directory"),
    ],
    ids=["garbage", "version", "no program", "exits", "no folder"],
)
async def test_a_program_that_is_no_server_is_not_opened(source: object, reason: str) -> None:
    error = await not_opened(connector(), source)  # type: ignore[arg-type]
    assert isinstance(error, ToolFailed)
    assert reason in str(error)
    assert "could not be opened" in str(error)


@pytest.mark.parametrize("era", ["handshake", "newest"])
async def test_programs_of_both_eras_keep_their_state_to_themselves(era: str) -> None:
    source, connection = stdio_counter(), connector()
    if era == "handshake":
        connection._handshake.add(str(source))
    async with connection.connect(source, CALLER) as one, connection.connect(source, CALLER) as two:
        assert [await text(session, "add_alone", number=2) for session in (one, two, one, two)] == ["2", "2", "4", "4"]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await one.call(call("wait", seconds=100))
        while await text(one, "cancelled") != "1":  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0.01)
        assert await text(two, "cancelled") == "0"


async def test_processes_that_the_program_started_end_with_the_session() -> None:
    async with connector().connect(stdio_counter(), CALLER) as session:
        child = int(await text(session, "start_child"))
        os.kill(child, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


async def test_a_program_inherits_only_the_named_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIVEN", "yes")
    monkeypatch.setenv("ROLLOUT_SECRET", "no")
    async with connector().connect(stdio_counter(environment=["GIVEN"]), CALLER) as session:
        assert await text(session, "variable", variable="GIVEN") == "yes"
        assert await text(session, "variable", variable="ROLLOUT_SECRET") == "(unset)"


async def test_a_program_that_exits_in_a_call_says_so() -> None:
    async with connector().connect(stdio_counter(), CALLER) as session:
        others = asyncio.create_task(fails(session, "wait", seconds=100))
        await asyncio.sleep(0.1)
        error = await fails(session, "exit", status=7)
        assert str(error).endswith("is gone: it exited with status 7")
        assert isinstance(await others, ToolsetLost)


FAILS = ["/bin/sh", "-c", "echo first >&2; echo no key >&2; exit 2"]


@pytest.mark.parametrize(("caller", "session"), [(CALLER, "rollout"), (ToolsetCaller(), "shared")])
async def test_models_do_not_read_the_standard_error_and_the_log_has_it_once(
    caplog: pytest.LogCaptureFixture, caller: ToolsetCaller, session: Literal["rollout", "shared"]
) -> None:
    error = await not_opened(connector(), mcp(FAILS, session=session), caller)
    assert str(error).endswith("could not be opened: it exited with status 2")
    (line,) = [record for record in caplog.records if "no key" in record.getMessage()]
    assert line.getMessage().endswith("it exited with status 2; its standard error ends with:\nfirst\nno key")
    assert line.levelname == "WARNING"
    assert getattr(line, "rollout_uid", "") == caller.uid


async def test_an_author_reads_the_standard_error_in_the_error(caplog: pytest.LogCaptureFixture) -> None:
    error = await not_opened(connector(), mcp(FAILS), ToolsetCaller())
    assert str(error).endswith("it exited with status 2; its standard error ends with: first no key")
    assert "no key" not in caplog.text


async def test_the_standard_error_of_a_session_that_is_closed_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    chatty = ["/bin/sh", "-c", f"echo ready >&2; exec {sys.executable} -S {mcp_faulty.__file__} none"]
    async with connector().connect(mcp(chatty), CALLER) as session:
        assert await text(session, "call") == "fine"
    assert "ready" not in caplog.text


async def test_sessions_are_opened_in_parallel_and_share_no_state() -> None:
    source = mcp([sys.executable, "-S", str(Path(__file__).parent.parent.parent / "support" / "mcp_tally.py")])
    connection = connector()

    async def one(number: int) -> list[str]:
        async with connection.connect(source, CALLER) as session:
            return [await text(session, "add", f"u{number}", number=number) for _ in range(3)]

    results = await asyncio.gather(*(one(number) for number in range(50)))
    assert results == [[str(number), str(2 * number), str(3 * number)] for number in range(50)]

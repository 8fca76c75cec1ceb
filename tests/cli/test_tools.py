"""`rollout tools list` and `rollout tools call` with real tool servers of each kind."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path

import pytest
from typer.testing import Result

from tests.cli.conftest import Invoke, complaint, document
from tests.support.processes import COMMAND
from tests.support.tool_server import TOOLS, serve_tools


def program(folder: Path) -> tuple[str, ...]:
    """The command of an MCP server on standard input."""
    (folder / "tools.py").write_text(TOOLS)
    return (*COMMAND, "tools", "serve", str(folder / "tools.py"), "--stdio")


async def test_tools_of_each_kind_of_server(tmp_path: Path, invoke: Invoke) -> None:
    started = program(tmp_path)

    async def run(*arguments: str) -> Result:
        return await asyncio.to_thread(invoke, "tools", *arguments)

    async with serve_tools(tmp_path) as serving:
        grpc, http, stdio = f"grpc://127.0.0.1:{serving.grpc_port}", serving.mcp_url, shlex.join(started)
        table = (await run("list", grpc)).stdout
        rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if "│" in line]
        assert ["add", "amount", "Add to the counter of the rollout.", ""] in rows
        assert ["upper", "text", "Return a text in capitals.", "yes"] in rows
        listed = [document(await run("list", "--json", *target)) for target in ((http,), ("--", *started))]
        assert listed[0] == listed[1]
        first = listed[0]["tools"][0]
        assert (first["name"], first["idempotent"]) == ("add", False)
        assert first["parameters"]["properties"] == {"amount": {"type": "integer"}}
        for target in (grpc, http, stdio):
            called = await run("call", target, "add", '{"amount": 3}')
            assert (called.exit_code, called.stdout) == (0, "3\n"), called.stderr
        for target in (grpc, http):
            failed = await run("call", target, "refuse")
            assert (failed.exit_code, failed.stdout, failed.stderr) == (1, "", "there is no such thing\n")
        picture = document(await run("call", grpc, "picture", "--json"))
        assert [part["type"] for part in picture["content"]] == ["text", "image_url"]
        error = document(await run("call", http, "refuse", "--json"))["error"]
        assert error == {"command": "tools call", "kind": "tool", "message": "there is no such thing"}


async def test_a_bearer_token_is_sent(tmp_path: Path, invoke: Invoke) -> None:
    async with serve_tools(tmp_path, "--bearer-variable", "THEIRS", THEIRS="rk_key") as serving:
        for target in (f"grpc://127.0.0.1:{serving.grpc_port}", serving.mcp_url):
            calling = ("tools", "call", target, "add", '{"amount": 2}', "--bearer-variable", "MINE")
            called = await asyncio.to_thread(invoke, *calling, MINE="rk_key")
            assert (called.exit_code, called.stdout) == (0, "2\n"), called.stderr
            wrong = complaint(await asyncio.to_thread(invoke, *calling, MINE="rk_wrong"))
            assert wrong.count("\n") == 1
            assert "rk_wrong" not in wrong


def test_a_key_is_needed_where_other_machines_can_call(invoke: Invoke) -> None:
    said = complaint(invoke("tools", "serve", "tools.py", "--host", "0.0.0.0"))
    assert "callers need a key: set ROLLOUT_TOOLS_KEY" in said
    assert "no file tools.py" in complaint(
        invoke("tools", "serve", "tools.py", "--host", "0.0.0.0", ROLLOUT_TOOLS_KEY="k")
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("list", "grpc://127.0.0.1:1"), "could not be reached"),
        (("list", "http://127.0.0.1:1/mcp"), "could not be reached"),
        (
            ("list", "127.0.0.1:1"),
            "'127.0.0.1:1' has no scheme; write grpc://127.0.0.1:1 for a ToolService, or http://",
        ),
        (("list", "no-such-program"), "could not be executed"),
        (("list", "ftp://example.com"), "TARGET 'ftp://example.com' is no grpc:// or grpcs:// URL"),
        (("list", "an 'open quote"), "neither a URL nor a command"),
        (("list", "http://me:secret@127.0.0.1:1/mcp"), "TARGET: a URL must not contain a user name or password"),
        (("call", "http://127.0.0.1:1/mcp#part", "add"), "TARGET: a URL must not have a fragment"),
        (("call", "grpc://127.0.0.1:1", "add", "[]"), "the arguments must be one JSON object"),
        (("list", "grpc://127.0.0.1:1", "--bearer-variable", "NOT_SET"), "NOT_SET is not set"),
        (("serve", "tools.py", "--bearer-variable", "NOT_SET"), "NOT_SET is not set"),
        (("serve", "tools.py", "--stdio", "--log-format", "xml"), "--log-format is text or json, not 'xml'"),
    ],
)
def test_what_cannot_be_called_is_one_line(invoke: Invoke, arguments: tuple[str, ...], text: str) -> None:
    said = complaint(invoke("tools", *arguments))
    assert text in said
    assert said.count("\n") == 1

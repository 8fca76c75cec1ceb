"""`rollout tools list` and `rollout tools call`: the tools of any tool server, for a person."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from rollout_server.cli.errors import report_errors
from rollout_server.cli.flags import secret_in
from rollout_server.cli.json_output import AsJson, error_document, open_output
from rollout_server.edge.grpc_loop import run_loop

if TYPE_CHECKING:
    from rollout_server.core.message import JSON
    from rollout_server.runtime.ports import Content
    from rollout_server.runtime.tools.toolset import ListedTool, ToolsetSession, ToolsetSource

_T = TypeVar("_T")
_CONNECT_SECONDS = 60.0
_UNAVAILABLE_SECONDS = 5.0
"""How long calls to a ToolService that cannot be reached are repeated."""
_TARGET = "grpc:// or grpcs:// URL of a ToolService, http:// or https:// URL of an MCP server, or the command of one"

_ADDRESS = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:]+\]):\d+")
_BEARER_FLAG = "--bearer-variable"

Bearer = Annotated[str, typer.Option(metavar="VAR", help="Environment variable with the bearer token that is sent.")]


def list_tools(
    target: Annotated[list[str], typer.Argument(metavar="TARGET", help=f"{_TARGET}, after `--` or in quotes.")],
    bearer_variable: Bearer = "",
    as_json: AsJson = False,
) -> None:
    """List the tools of a tool server.

    With --json: {"tools": [{"name", "description", "parameters", "idempotent"}]}.
    """
    with report_errors("tools list"), open_output(as_json=as_json) as output:
        source = source_of(target, bearer_variable)
        listed = run_loop(_list(source, secret_in(bearer_variable, _BEARER_FLAG)))
        output.write({"tools": [_fields(each) for each in listed]})
        if not as_json:
            _show(listed)


def call_tool(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=f"{_TARGET}, in quotes.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the tool.")],
    arguments: Annotated[str, typer.Argument(metavar="JSON", help="Arguments, one JSON object.")] = "{}",
    bearer_variable: Bearer = "",
    as_json: AsJson = False,
) -> None:
    """Call a tool of a tool server, and print its result.

    If the tool reports an error, its text goes to standard error, and the exit
    code is 1.

    With --json: {"content": str or a list of parts}.
    """
    from rollout_server.inspection.escape import visible_lines
    from rollout_server.runtime.errors import ToolError

    failed = ""
    with report_errors("tools call"), open_output(as_json=as_json) as output:
        source = source_of([target], bearer_variable)
        try:
            content = run_loop(_call(source, secret_in(bearer_variable, _BEARER_FLAG), name, _object(arguments)))
        except ToolError as error:
            failed = str(error)
            output.write(error_document("tools call", "tool", failed))
        else:
            output.write({"content": content})
            if not as_json:
                typer.echo(_text(content))
    if failed:
        if not as_json:
            typer.secho(visible_lines(failed), fg=typer.colors.RED, err=True)
        raise typer.Exit(1)


def source_of(words: Sequence[str], bearer_variable: str) -> ToolsetSource:
    """Return the toolset that a command line names. Raises `AuthorError`."""
    from rollout_server.authoring.author_traceback import AuthorError
    from rollout_server.core.spec import Dialect, Target
    from rollout_server.runtime.tools.toolset import RequestedToolset

    first = words[0]
    if len(words) == 1 and first.startswith(("grpc://", "grpcs://")):
        return RequestedToolset(Target(first.rstrip("/"), Dialect.GRPC))
    if len(words) == 1 and first.startswith(("http://", "https://")):
        return _mcp_server(first, bearer_variable)
    if len(words) == 1 and _ADDRESS.fullmatch(first):
        raise AuthorError(
            f"TARGET {first!r} has no scheme; write grpc://{first} for a ToolService, or http://{first}/mcp for an MCP server"
        )
    try:
        command = tuple(shlex.split(first) if len(words) == 1 else words)
    except ValueError as error:
        raise AuthorError(f"TARGET {first!r} is neither a URL nor a command: {error}") from None
    if not command or "://" in first:
        raise AuthorError(f"TARGET {first!r} is no {_TARGET}")
    return _mcp_server(command)


def _mcp_server(server: str | tuple[str, ...], bearer_variable: str = "") -> ToolsetSource:
    from rollout_server.authoring.author_traceback import AuthorError
    from rollout_server.tool import mcp

    try:
        return mcp(server, bearer_variable=bearer_variable)
    except ValueError as error:
        raise AuthorError(str(error).replace("mcp:", "TARGET:", 1)) from None


async def _list(source: ToolsetSource, bearer: str) -> Sequence[ListedTool]:
    return await _in_session(source, bearer, lambda session: session.list_tools())


async def _call(source: ToolsetSource, bearer: str, name: str, arguments: Mapping[str, JSON]) -> Content:
    from rollout_server.runtime.tools.toolset import ToolsetCall

    call = ToolsetCall(name, arguments, key=uuid.uuid4().hex, uid="")
    return await _in_session(source, bearer, lambda session: session.call(call))


async def _in_session(
    source: ToolsetSource, bearer: str, work: Callable[[ToolsetSession], Coroutine[Any, Any, _T]]
) -> _T:
    """Return what `work` returns. `ToolFailed` becomes ValueError, which commands report as one line. `ToolError` is raised."""
    from rollout_server.runtime.tools.protocols import ToolFailed

    try:
        async with asyncio.timeout(_CONNECT_SECONDS) as limit, _session(source, bearer) as session:
            limit.reschedule(None)
            # A task, because the session's own tasks would wrap an error that is raised in this block.
            task = asyncio.create_task(work(session))
            await asyncio.wait({task})
        return task.result()
    except ToolFailed as error:
        raise ValueError(str(error)) from None
    except TimeoutError:
        raise ValueError(f"{source} did not open a session within {_CONNECT_SECONDS:g} s") from None


@asynccontextmanager
async def _session(source: ToolsetSource, bearer: str) -> AsyncIterator[ToolsetSession]:
    """Open a session with a tool server. A person may name any address."""
    from rollout_server.edge.grpc_channels import Channels
    from rollout_server.edge.rpc.tls import ClientTls
    from rollout_server.edge.targets.resolver import CheckedLookup
    from rollout_server.edge.targets.rules import TargetRules
    from rollout_server.edge.toolsets.mcp.connector import McpConnector
    from rollout_server.edge.toolsets.tool_service import ToolServiceConnector, ToolServiceTimes
    from rollout_server.runtime.tools.toolset import McpServer, ToolsetCaller

    async with AsyncExitStack() as stack:
        lookup, caller = CheckedLookup(TargetRules.parse()), ToolsetCaller(bearer=bearer)
        stack.push_async_callback(lookup.close)
        if isinstance(source, McpServer):
            opened = McpConnector(lookup).connect(source, caller)
        else:
            channels = Channels(lookup, ClientTls())
            stack.push_async_callback(channels.close)
            times = ToolServiceTimes(listing=_UNAVAILABLE_SECONDS, unavailable=_UNAVAILABLE_SECONDS)
            opened = ToolServiceConnector(channels, times).connect(source, caller)
        yield await stack.enter_async_context(opened)


def _object(text: str) -> Mapping[str, JSON]:
    from rollout_server.authoring.author_traceback import AuthorError
    from rollout_server.core.message import MalformedMessage, parse_object

    try:
        return parse_object(text)
    except MalformedMessage as error:
        raise AuthorError(f"the arguments must be one JSON object: {error}") from None


def _fields(listed: ListedTool) -> dict[str, Any]:
    try:
        parameters: object = json.loads(listed.parameters_json_schema)
    except (ValueError, RecursionError):
        parameters = listed.parameters_json_schema
    return {
        "name": listed.name,
        "description": listed.description,
        "parameters": parameters,
        "idempotent": listed.idempotent,
    }


def _show(listed: Sequence[ListedTool]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from rollout_server.inspection.escape import visible

    table = Table()
    for heading in ("name", "arguments", "description", "idempotent"):
        table.add_column(heading, overflow="fold")
    for each in listed:
        parameters = _fields(each)["parameters"]
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        names = ", ".join(map(str, properties)) if isinstance(properties, dict) else ""
        first = next(iter(each.description.strip().splitlines()), "")
        cells = (each.name, names, first, "yes" if each.idempotent else "")
        table.add_row(*(Text(visible(cell)) for cell in cells))
    Console(highlight=False).print(table)


def _text(content: Content) -> str:
    """Return texts as they are, and each other part as one line of JSON."""
    if isinstance(content, str):
        return content
    lines = [str(part["text"]) if part.get("type") == "text" else json.dumps(part) for part in content]
    return "\n".join(lines)

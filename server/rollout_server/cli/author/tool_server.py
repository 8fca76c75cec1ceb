"""`rollout tools serve`: serve tools to other programs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout_server.cli.errors import report_errors
from rollout_server.cli.flags import accept_flags, pick_flags, secret_in
from rollout_server.cli.json_output import open_output
from rollout_server.edge.grpc_loop import loop_factory, run_loop

if TYPE_CHECKING:
    from rollout_server.tool_server.server import ToolServer, ToolServerSettings

KEY_VARIABLE = "ROLLOUT_TOOLS_KEY"


@dataclass(frozen=True, slots=True)
class ServeToolsFlags:
    """Arguments and flags of `rollout tools serve`."""

    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="FILE.py[:OBJECT] or MODULE[:OBJECT]: an agent, a tool or a list of tools."
        ),
    ]
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="gRPC port; 0 picks a free one.")] = 50055
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP port; 0 picks a free one.")] = 9005
    bearer_variable: Annotated[
        str,
        typer.Option(
            metavar="VAR",
            help=f"Environment variable with the bearer key that callers need. Default: {KEY_VARIABLE}, if it is set.",
        ),
    ] = ""
    stdio: Annotated[
        bool, typer.Option("--stdio", help="Be an MCP server on standard input and output, and open no port.")
    ] = False
    log_format: Annotated[str, typer.Option(help="Log format: text or json.")] = "text"
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object on one line once it serves; log in JSON.")
    ] = False


@accept_flags(ServeToolsFlags)
def serve_tools(**values: Any) -> None:
    """Serve tools over gRPC (ToolService) and HTTP (MCP, at /mcp).

    Without OBJECT they are the tools of the only agent of the file, or all its
    tools. They run under their own policies until SIGTERM or Ctrl-C. Calls with
    a rollout's uid share its state; others have that of their MCP session.

    With --json: a line {"serving": {"grpc_port", "http_port", "tools"}} once it
    serves.
    """
    flags = pick_flags(ServeToolsFlags, values)
    with report_errors("tools serve"), open_output(as_json=flags.as_json) as output:
        from rollout_server import logs
        from rollout_server.authoring.tool_loader import load_tools

        settings = _settings(flags)
        logs.set_up("json" if flags.log_format == "json" or flags.as_json else "text", "info")
        if flags.stdio:
            _serve_stdio(flags.target)
            return

        def serving(server: ToolServer) -> None:
            ports = {"grpc_port": server.grpc_port, "http_port": server.http_port}
            output.line({"serving": {**ports, "tools": [each.name for each in loaded.tools]}})

        loaded = load_tools(flags.target)
        from rollout_server.tool_server import server as tool_server

        run_loop(tool_server.serve_tools(loaded, settings, serving), loop_factory())


def _serve_stdio(target: str) -> None:
    from rollout_server.authoring.tool_loader import load_tools
    from rollout_server.tool_server.limits import ToolServerLimits
    from rollout_server.tool_server.server import serve_tools_on_stdio
    from rollout_server.tool_server.stdio import reserved_streams

    with reserved_streams() as streams:
        run_loop(serve_tools_on_stdio(load_tools(target), streams, ToolServerLimits()))


def _settings(flags: ServeToolsFlags) -> ToolServerSettings:
    """Return the settings. Raise `AuthorError` for flags that do not fit together, and for a missing key."""
    from rollout_server.authoring.author_traceback import AuthorError
    from rollout_server.network_exposure import is_loopback
    from rollout_server.tool_server.server import ToolServerSettings

    if flags.log_format not in ("text", "json"):
        raise AuthorError(f"--log-format is text or json, not {flags.log_format!r}")
    if flags.stdio and flags.as_json:
        raise AuthorError("--stdio and --json exclude each other: standard output carries MCP")
    key = secret_in(flags.bearer_variable, "--bearer-variable") or os.environ.get(KEY_VARIABLE, "")
    if not key and not flags.stdio and not is_loopback(flags.host):
        raise AuthorError(
            f"other machines can reach {flags.host}, so callers need a key: set {KEY_VARIABLE} (`rollout keys new` makes one), or "
            "listen on 127.0.0.1"
        )
    return ToolServerSettings(flags.host, flags.grpc_port, flags.http_port, key)

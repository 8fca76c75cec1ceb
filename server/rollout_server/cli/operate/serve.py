"""`rollout serve`: the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout_server.cli.errors import report_errors
from rollout_server.cli.flags import accept_flags, pick_flags
from rollout_server.cli.json_output import JsonOutput, open_output

if TYPE_CHECKING:
    from rollout_server.agent import Agent
    from rollout_server.app import Server


@dataclass(frozen=True, slots=True)
class ServeFlags:
    """What `rollout serve` takes."""

    agents: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TARGET...]",
            help="Agents: MODULE[:OBJECT] or FILE.py[:OBJECT]; the first is the default. Default: the calculator.",
        ),
    ] = None
    host: Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 unless set otherwise.")] = None
    http_port: Annotated[int | None, typer.Option(help="HTTP port; 0: any.")] = None
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port; 0: any.")] = None
    tokenizer: Annotated[
        list[str] | None, typer.Option(help="NAME=DIRECTORY, repeatable; the directory 'toy' is the built-in one.")
    ] = None
    log_format: Annotated[str | None, typer.Option(help="text or json.")] = None
    reload: Annotated[
        bool, typer.Option("--reload", help="For development: restart when a Python file near the agents changes.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object on a line once it serves; logs in JSON.")] = (
        False
    )


@accept_flags(ServeFlags)
def serve(**values: Any) -> None:
    """Serve agents over gRPC and HTTP until SIGTERM or Ctrl-C.

    OBJECT is an Agent, or a subclass whose constructor takes no arguments. It may be left out if there is exactly one agent.

    Everything else is set through the environment or .env: see `rollout config`.

    With --json: {"serving": {"grpc_port", "http_port", "agents"}} on a line, with --reload one at each restart.
    """
    flags = pick_flags(ServeFlags, values)
    with report_errors("serve"):
        settings = _settings(flags)
        if flags.reload:
            from rollout_server.cli.operate.reload import serve_anew

            serve_anew(flags.agents or [])  # whose servers answer for themselves
            return
        from rollout_server.authoring.agent_loader import find_agents

        with open_output(as_json=flags.as_json) as output:
            _serve(find_agents(flags.agents or []), settings, output)


def _serve(found: Sequence[Agent], settings: dict[str, object], output: JsonOutput) -> None:
    from rollout_server import app  # gRPC takes its time
    from rollout_server.calculator import Calculator
    from rollout_server.settings import load

    agents = found or [Calculator(delay=load(**settings).calculator_delay_seconds)]

    def serving(server: Server) -> None:
        ports = {"grpc_port": server.grpc_port, "http_port": server.http_port or None}
        output.line({"serving": {**ports, "agents": [agent.name for agent in agents]}})

    app.serve_with(agents, settings, serving)


def _settings(flags: ServeFlags) -> dict[str, object]:
    log_format = flags.log_format or ("json" if flags.as_json else None)
    chosen: dict[str, object] = {
        "host": flags.host,
        "http_port": flags.http_port,
        "grpc_port": flags.grpc_port,
        "log_format": log_format,
    }
    if flags.tokenizer:
        chosen["tokenizers"] = dict(_pair(text) for text in flags.tokenizer)
    return {name: value for name, value in chosen.items() if value is not None}


def _pair(text: str) -> tuple[str, Path]:
    name, separator, directory = text.partition("=")
    if not separator or not name or not directory:
        raise typer.BadParameter(f"{text!r} is not NAME=DIRECTORY", param_hint="--tokenizer")
    return name, Path(directory)

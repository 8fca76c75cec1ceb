"""`rollout serve`: run the server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout_server.cli.errors import report_errors
from rollout_server.cli.flags import accept_flags, pick_flags, tokenizer_directories
from rollout_server.cli.json_output import JsonOutput, open_output

if TYPE_CHECKING:
    from rollout_server.agent import Agent
    from rollout_server.app import Server


@dataclass(frozen=True, slots=True)
class ServeFlags:
    """Arguments and flags of `rollout serve`."""

    agents: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TARGET...]",
            help="Agents: MODULE[:OBJECT] or FILE.py[:OBJECT]. The first is the default agent. Default: the calculator.",
        ),
    ] = None
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")] = None
    http_port: Annotated[int | None, typer.Option(help="HTTP port; 0 picks a free one.")] = None
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port; 0 picks a free one.")] = None
    tokenizer: Annotated[
        list[str] | None,
        typer.Option(help="Tokenizer NAME=DIRECTORY, repeatable; DIRECTORY toy: the built-in one."),
    ] = None
    workers: Annotated[int | None, typer.Option(help="Processes that serve the same ports. Default: 1.")] = None
    log_format: Annotated[str | None, typer.Option(help="Log format: text or json.")] = None
    reload: Annotated[
        bool,
        typer.Option(
            "--reload", help="Restart when a Python file in the agents' directories changes. For development."
        ),
    ] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object on one line once it serves; log in JSON.")
    ] = False


@accept_flags(ServeFlags)
def serve(**values: Any) -> None:
    """Serve agents over gRPC and HTTP until SIGTERM or Ctrl-C.

    OBJECT is an Agent, or a subclass whose constructor takes no arguments. It may
    be omitted if the module defines exactly one agent.

    All other settings come from the environment or .env: see `rollout config`.

    With --json: a line {"serving": {"grpc_port", "http_port", "agents"}} once it
    serves, and with --reload after each restart.
    """
    flags = pick_flags(ServeFlags, values)
    with report_errors("serve"):
        settings = _settings(flags)
        if flags.reload:
            from rollout_server.cli.operate.reload import serve_anew

            serve_anew(flags.agents or [])  # each restarted server prints its own JSON
            return
        if _supervises(settings, flags):
            return
        from rollout_server.authoring.agent_loader import find_agents

        with open_output(as_json=flags.as_json) as output:
            _serve(find_agents(flags.agents or []), settings, output)


def _supervises(settings: dict[str, object], flags: ServeFlags) -> bool:
    """Serve with several workers if the settings want them, and return whether they did. Raise Exit for an exit code but 0."""
    from rollout_server.settings import load
    from rollout_server.workers.link import is_worker
    from rollout_server.workers.supervisor import supervise

    if is_worker() or (chosen := load(**settings)).workers == 1:
        return False
    with open_output(as_json=flags.as_json) as output:

        def announce(grpc_port: int, http_port: int, agents: Sequence[str]) -> None:
            output.line(_serving_document(grpc_port, http_port, agents))

        command = [sys.executable, "-m", "rollout_server.cli", *sys.argv[1:]]
        if code := supervise(chosen, command, announce):
            raise typer.Exit(code)
    return True


def _serve(found: Sequence[Agent], settings: dict[str, object], output: JsonOutput) -> None:
    from rollout_server.calculator import Calculator
    from rollout_server.serving import serve_with  # imported late: gRPC is slow to import
    from rollout_server.settings import load

    agents = found or [Calculator(delay=load(**settings).calculator_delay_seconds)]

    def announce(server: Server) -> None:
        output.line(_serving_document(server.grpc_port, server.http_port, [agent.name for agent in agents]))

    serve_with(agents, settings, announce)


def _serving_document(grpc_port: int, http_port: int, agents: Sequence[str]) -> dict[str, object]:
    return {"serving": {"grpc_port": grpc_port, "http_port": http_port or None, "agents": list(agents)}}


def _settings(flags: ServeFlags) -> dict[str, object]:
    log_format = flags.log_format or ("json" if flags.as_json else None)
    chosen: dict[str, object] = {
        "host": flags.host,
        "http_port": flags.http_port,
        "grpc_port": flags.grpc_port,
        "workers": flags.workers,
        "log_format": log_format,
    }
    if flags.tokenizer:
        chosen["tokenizers"] = tokenizer_directories(flags.tokenizer)
    return {name: value for name, value in chosen.items() if value is not None}

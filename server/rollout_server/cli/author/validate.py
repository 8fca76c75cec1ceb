"""`rollout validate`: check agents for errors."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout_server.cli.demo_output import plural
from rollout_server.cli.errors import quiet_transformers, report_errors
from rollout_server.cli.flags import CompletionFlags
from rollout_server.cli.json_output import AsJson, open_output
from rollout_server.cli.prompt_flags import PromptFlags
from rollout_server.edge.grpc_loop import run_loop

if TYPE_CHECKING:
    from rich.console import Console
    from rollout_client import AsyncClient

    from rollout_server.agent import Agent
    from rollout_server.authoring.validation import AgentReport


def validate(
    targets: Annotated[
        list[str], typer.Argument(metavar="TARGET...", help="Agents: MODULE[:OBJECT] or FILE.py[:OBJECT].")
    ],
    call_tools: Annotated[
        bool,
        typer.Option(
            "--call-tools", help="Call each tool once with arguments that fit its schema. The tools run for real."
        ),
    ] = False,
    metadata: Annotated[
        str, typer.Option(metavar="JSON", help="Metadata of the dry run, for agents that read run.metadata.")
    ] = "",
    script: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="Mock model of the dry run, as in `rollout run`; its MODELS are the further models."
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Check agents: import, tool schemas and a dry run with a mock model.

    OBJECT may be omitted to check all agents of a module or file. The mock model
    calls tools only with --call-tools. The exit code is 1 if there are errors;
    advice does not change it.

    With --json: {"valid": bool, "agents": [{"name", "version",
    "tools": [{"name", "parameters", "errors", "advice", "called"}],
    "errors", "advice", "dry_run"}], "next"}.
    """
    quiet_transformers()
    with report_errors("validate"), open_output(as_json=as_json) as output:
        from rich.console import Console

        from rollout_server.authoring.agent_loader import all_agents
        from rollout_server.authoring.author_traceback import AuthorError

        if call_tools and script:
            raise AuthorError("--call-tools and --script exclude each other: a script decides which tools are called")
        agents = [agent for target in targets for agent in all_agents(target)]
        console = Console(highlight=False)
        dry_run = DryRun(PromptFlags(metadata=metadata).read_metadata(), script, call_tools)
        reports = run_loop(_validate(agents, console, dry_run))
        valid = all(report.valid for report in reports)
        step = _next(targets[0], reports, valid=valid, called=call_tools)
        found = [{**asdict(report), "valid": report.valid} for report in reports]
        output.write({"valid": valid, "agents": found, "next": step})
        for report in reports:
            _show(console, report)
        console.print(f"next: {step}", markup=False, soft_wrap=True)
    raise typer.Exit(0 if valid else 1)


@dataclass(frozen=True, slots=True)
class DryRun:
    """The dry run of each agent: its metadata, and the mock model of `--script` or one that calls each tool once or none."""

    metadata: Mapping[str, Any]
    script: str = ""
    call_tools: bool = False


async def _validate(agents: Sequence[Agent], console: Console, dry_run: DryRun) -> list[AgentReport]:
    from rollout_server.authoring.author_traceback import AuthorError
    from rollout_server.cli.local_server import print_server_log

    names = [agent.name for agent in agents]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise AuthorError(
            f"several agents have the name {', '.join(map(repr, sorted(doubled)))}; requests choose agents by name"
        )
    with print_server_log(console):
        return [await _validate_agent(agent, dry_run) for agent in agents]


async def _validate_agent(agent: Agent, dry_run: DryRun) -> AgentReport:
    """Validate one agent in a separate server, because the mock model calls the tools of this agent."""
    from rollout_server.authoring.model_stubs import ModelStub
    from rollout_server.authoring.validation import DryModel, callable_tools, report_external
    from rollout_server.authoring.validation import validate as validated
    from rollout_server.cli.local_server import serve_for_command, serve_with_stub

    if agent.external:
        return report_external(agent)
    calls: list[tuple[str, Any]] = []

    async def prepare(client: AsyncClient) -> ModelStub:
        if dry_run.call_tools:
            calls.extend(callable_tools(await client.tools(agent.name)))
        return ModelStub("a dry run", DryModel(calls))

    serve = serve_for_command([agent], CompletionFlags(script=dry_run.script)) if dry_run.script else None
    async with serve or serve_with_stub([agent], prepare) as server:
        return await validated(server.client, server.endpoint, agent, lambda: calls, dry_run.metadata)


def _show(console: Console, report: AgentReport) -> None:
    from rich.table import Table
    from rich.text import Text

    from rollout_server.inspection.escape import visible

    table = Table(title=visible(f"agent {report.name}, version {report.version}"), title_justify="left")
    for heading in ("", "subject", "result"):
        table.add_column(heading, overflow="fold")
    for kind, what, text in _lines(report):
        style = {"error": "bold red", "advice": "yellow"}.get(kind, "green")
        table.add_row(Text(kind, style), Text(visible(what)), Text(visible(text)))
    console.print(table)


def _lines(report: AgentReport) -> list[tuple[str, str, str]]:
    run = report.dry_run
    lines = []
    for tool in report.tools:
        what = f"tool {tool.name}"
        lines += [("error", what, text) for text in tool.errors] + [("advice", what, text) for text in tool.advice]
        if not tool.errors:
            parameters = ", ".join(tool.parameters.get("properties", {})) or "no parameters"
            lines.append(("ok", what, f"{parameters}; a call returned {tool.called}" if tool.called else parameters))
    lines += [("error", "dry run", text) for text in report.errors]
    lines += [("advice", "dry run", text) for text in run.get("warnings", ())]
    lines += [("advice", "agent", text) for text in report.advice]
    if not report.errors and run:
        reward = "no reward" if run.get("reward") is None else f"reward {run['reward']:g}"
        lines.append(
            (
                "ok",
                "dry run",
                f"completed ({run.get('reason')}) after {plural(run['turns'], 'turn')}, {reward}",
            )
        )
    return lines


def _next(named: str, reports: Sequence[AgentReport], *, valid: bool, called: bool) -> str:
    target = shlex.quote(named)
    if not valid:
        return (
            "fix the errors above and validate again; give what the agent needs from a request with --metadata JSON, and "
            "further models with --script FILE"
        )
    if not called and any(report.tools for report in reports):
        return f"rollout validate {target} --call-tools calls each tool once; rollout run {target} --prompt TEXT runs a rollout"
    return f"rollout run {target} --prompt TEXT runs a rollout; rollout eval {target} DATASET evaluates the agent"

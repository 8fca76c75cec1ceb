"""The `rollout` command group and its subcommands."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rollout_server.cli.author.demo import demo
from rollout_server.cli.author.eval import evaluate
from rollout_server.cli.author.inspect import inspect
from rollout_server.cli.author.new import new
from rollout_server.cli.author.run import run
from rollout_server.cli.author.tokens import tokens
from rollout_server.cli.author.tool_client import call_tool, list_tools
from rollout_server.cli.author.tool_server import serve_tools
from rollout_server.cli.author.validate import validate
from rollout_server.cli.author.verify import verify
from rollout_server.cli.json_output import AsJson, error_document, json_mode
from rollout_server.cli.operate.config import config
from rollout_server.cli.operate.deliveries import deliveries
from rollout_server.cli.operate.follow import start, watch
from rollout_server.cli.operate.gateway import gateway
from rollout_server.cli.operate.journal import journal
from rollout_server.cli.operate.keys import keys
from rollout_server.cli.operate.rollouts import cancel, ps
from rollout_server.cli.operate.serve import serve
from rollout_server.cli.operate.trainer import trainer
from rollout_server.cli.operate.view import view


class Commands(TyperGroup):
    """Group of all subcommands. With `--json` it prints usage errors as JSON too."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line, then exit unless `standalone_mode` is False."""
        arguments = sys.argv[1:] if args is None else list(args)
        parsed = super().main
        with json_mode(arguments) as as_json:
            if not as_json or not standalone_mode:
                return parsed(arguments, prog_name, complete_var, standalone_mode, windows_expand_args, **extra)
            try:
                code = parsed(arguments, prog_name, complete_var, False, windows_expand_args, **extra)
            except Exception as error:
                code = _print_usage_error(error, arguments)
            sys.exit(code if isinstance(code, int) else 0)


def _print_usage_error(error: Exception, arguments: Sequence[str]) -> int:
    """Print a usage error as JSON and return its exit code. Any other exception is raised again."""
    # Only the exceptions of Click, which typer is built on, have `format_message`.
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        raise error
    names = [word for word in arguments[:1] if not word.startswith("-")]
    typer.echo(json.dumps(error_document(" ".join(names), "usage", format_message())))
    code: int = getattr(error, "exit_code", 2)
    return code


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Run multi-turn, tool-using agents for RL training of LLMs, with token ids, loss masks and logprobs. "
    "All commands accept --json.",
)


def _print_version(requested: bool) -> None:
    if requested:
        version()
        raise typer.Exit


@app.callback()
def rollout(
    _: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options that precede a subcommand."""


for command in (
    new,
    serve,
    validate,
    run,
    evaluate,
    ps,
    start,
    watch,
    cancel,
    deliveries,
    inspect,
    view,
    verify,
    gateway,
    trainer,
    demo,
    config,
):
    app.command("eval" if command is evaluate else None)(command)
app.command("test", hidden=True)(evaluate)  # the earlier name of `eval`
app.add_typer(keys, name="keys")
app.add_typer(journal, name="journal")
app.add_typer(tokens, name="tokens")
tools = typer.Typer(
    no_args_is_help=True, help="Serve tools to other programs, and list and call the tools of any tool server."
)
tools.command("serve")(serve_tools)
tools.command("list")(list_tools)
tools.command("call")(call_tool)
app.add_typer(tools, name="tools")


@app.command()
def version(as_json: AsJson = False) -> None:
    """Print the version."""
    from rollout_server import __version__

    typer.echo(json.dumps({"version": __version__}) if as_json else __version__)

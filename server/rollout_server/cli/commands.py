"""The list of subcommands."""

from __future__ import annotations

import typer

from rollout_server.cli.config import config
from rollout_server.cli.demo import demo
from rollout_server.cli.gateway import gateway
from rollout_server.cli.inspect import inspect
from rollout_server.cli.keys import keys
from rollout_server.cli.serve import serve
from rollout_server.cli.tokens import tokens
from rollout_server.cli.trainer import trainer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Runs agent rollouts for RL training and knows who wrote every token.",
)
for command in (serve, gateway, trainer, demo, inspect, config):
    app.command()(command)
app.add_typer(keys, name="keys")
app.add_typer(tokens, name="tokens")


@app.command()
def version() -> None:
    """Print the version."""
    from rollout_server import __version__

    typer.echo(__version__)

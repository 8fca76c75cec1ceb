"""`rollout keys`: create API keys."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rollout_server.cli.json_output import AsJson

keys = typer.Typer(no_args_is_help=True, help="Create API keys for ROLLOUT_API_KEYS and ROLLOUT_API_KEYS_FILE.")


@keys.callback()
def _keys() -> None:
    """Keep `new` a subcommand: without a callback, typer makes a single command the group itself."""


@keys.command()
def new(
    name: Annotated[
        str, typer.Argument(help="Name of the caller. Rollouts belong to the name; it may have several keys.")
    ],
    admin: Annotated[bool, typer.Option(help="The key may list, read and cancel the rollouts of all callers.")] = False,
    as_json: AsJson = False,
) -> None:
    """Create an API key and the hashed entry for the server's settings.

    The key is printed once, on standard error. The entry is printed on standard
    output, so `rollout keys new ci >> keys.txt` stores only the entry.

    With --json both are printed on standard output: {"key", "entry"}.
    """
    from rollout_server.edge.api_keys import entry_of, new_key  # imported late: it imports the runtime

    key = new_key()
    try:
        entry = entry_of(name, key, admin=admin)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="NAME") from None
    if as_json:
        typer.echo(json.dumps({"key": key, "entry": entry}))
        return
    typer.echo(f"key (shown once): {key}", err=True)
    typer.echo(entry)

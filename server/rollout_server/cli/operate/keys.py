"""`rollout keys`: API keys."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rollout_server.cli.json_output import AsJson

keys = typer.Typer(no_args_is_help=True, help="API keys for ROLLOUT_API_KEYS and ROLLOUT_API_KEYS_FILE.")


@keys.callback()
def _keys() -> None:
    """With a callback, `new` stays a command of its own although it is the only one."""


@keys.command()
def new(
    name: Annotated[str, typer.Argument(help="Whose key it is; rollouts belong to this name, whichever key it uses.")],
    admin: Annotated[bool, typer.Option(help="Sees and cancels everybody's rollouts.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a key: the key itself, for the caller, and the entry that stands for it, for the server.

    The key goes to standard error, the entry to standard output: `rollout keys new ci >> keys.txt` files the entry alone.

    With --json both go to standard output: {"key", "entry"}.
    """
    from rollout_server.edge.api_keys import entry_of, new_key  # importing it brings the runtime

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

"""`rollout journal`: the journal of a stopped server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rollout_server.cli.errors import report_errors
from rollout_server.cli.json_output import AsJson

journal = typer.Typer(no_args_is_help=True, help="Remove rollouts from the journal of a stopped server.")


@journal.callback()
def _journal() -> None:
    """Keep `drop` a subcommand: without a callback, typer makes a single command the group itself."""


@journal.command()
def drop(
    directory: Annotated[
        Path, typer.Argument(help="Directory of the journal.", exists=True, file_okay=False, show_default=False)
    ],
    uids: Annotated[list[str], typer.Argument(metavar="UID...", help="Uids of the rollouts.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Remove rollouts that cannot be read, so that a server starts with the others.

    They are damaged, or the key of their credentials is lost; this needs no key.

    All of a rollout is removed: its callers receive no outcome, and a start that
    is repeated with its request id runs again. A group that loses a rollout is
    not known any more, and its other rollouts continue one by one; with a
    `reward_group` the unfinished ones end as interrupted. All other rollouts stay
    as they are. Copy the directory first.

    Nothing is removed if the journal has no rollout with one of the uids, or if a
    server uses it. With --json: {"dropped": [UID, ...]}.
    """
    from rollout_server.edge.journal.dropping import drop_rollouts

    with report_errors("journal drop"):
        dropped = drop_rollouts(directory, uids)
    if as_json:
        typer.echo(json.dumps({"dropped": dropped}))
        return
    for uid in dropped:
        typer.echo(f"dropped {uid}")

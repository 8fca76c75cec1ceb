"""The command `rollout`: one small module for each subcommand."""

from __future__ import annotations


def main() -> None:
    """Runs the command line."""
    from rollout_server.cli.commands import app  # typer and rich are not needed elsewhere

    app()

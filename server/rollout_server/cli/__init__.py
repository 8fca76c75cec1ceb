"""The command `rollout`: one small module for each subcommand."""

from __future__ import annotations

import os


def main() -> None:
    """Runs the command line."""
    # gRPC tells on standard error of each connection that a peer gives up, though nobody asked it.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from rollout_server.cli.commands import app  # typer and rich are not needed elsewhere

    app()

"""The command `rollout`: one small module for each subcommand."""

from __future__ import annotations

import os
import re
import sys


def main() -> None:
    """Runs the command line."""
    # gRPC tells on standard error of each connection that a peer gives up, though nobody asked it.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        from rollout_server.cli.commands import app  # typer and rich are not needed elsewhere

        app()
    except ModuleNotFoundError as error:
        if not _only_client():
            raise
        needed = 'pip install "rollout-server[server]" (in a clone of it: pip install ".[server]")'
        sys.exit(f"rollout: {error.name} is not installed; the command needs {needed}")


def _only_client() -> bool:
    """Whether something is missing of what is installed with the server; a client is installed without it."""
    from importlib.metadata import PackageNotFoundError, distribution, requires

    for requirement in requires("rollout-server") or ():
        name, _, marker = requirement.partition(";")
        if re.search(r"extra == .server.", marker):
            try:
                distribution(re.split(r"[^\w.-]", name)[0])
            except PackageNotFoundError:
                return True
    return False

"""The `rollout` command. Each subcommand has its own module."""

from __future__ import annotations

import atexit
import gc
import os
import re
import sys


def main() -> None:
    """Run the command line."""
    # Without this, gRPC prints a line to standard error for each connection that a peer drops.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # At exit, Python's garbage collector would scan all objects, which takes up to two seconds.
    atexit.register(gc.freeze)
    try:
        from rollout_server.cli.commands import app  # a client is installed without typer and rich

        app()
    except ModuleNotFoundError as error:
        if not _only_client():
            raise
        needed = 'pip install "rollout-server[server]" (in a clone of it: pip install ".[server]")'
        sys.exit(f"rollout: the module {error.name} is not installed; run: {needed}")


def _only_client() -> bool:
    """Return whether a dependency of the extra `server` is missing. The client is installed without that extra."""
    from importlib.metadata import PackageNotFoundError, distribution, requires

    for requirement in requires("rollout-server") or ():
        name, _, marker = requirement.partition(";")
        if re.search(r"extra == .server.", marker):
            try:
                distribution(re.split(r"[^\w.-]", name)[0])
            except PackageNotFoundError:
                return True
    return False

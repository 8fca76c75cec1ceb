"""How a command says what is wrong: in one line, without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def complaining(command: str) -> Iterator[None]:
    """Turns what a user can mend (settings, ports, files) into a line and exit code 1."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        typer.secho(f"rollout {command}: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None

"""How a command says what is wrong: in one line, without a traceback, and without the libraries' remarks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def complaining(command: str, code: int = 1) -> Iterator[None]:
    """Turns what a user can mend (settings, ports, files, tokenizers) into a line and an exit code."""
    from rollout_server.runtime.port import Failed

    try:
        yield
    except (Failed, OSError, RuntimeError, ValueError) as error:
        typer.secho(f"rollout {command}: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(code) from None


def hush_transformers() -> None:
    """Before it is imported: it would say that it misses PyTorch, which nobody needs here. A setting of the user's stays."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

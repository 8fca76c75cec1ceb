"""How a command says what is wrong: in one line, without a traceback, and without the libraries' remarks."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from rollout_server.cli.json_output import error_document, is_json


class Interrupted(RuntimeError):
    """The user ended the command."""

    exit_code = 130  # a shell's own for Ctrl-C


@contextmanager
def report_errors(command: str, code: int = 1) -> Iterator[None]:
    """Turns what a user can mend (settings, ports, files, agents, tokenizers) into a line, or JSON, and an exit code."""
    from rollout_server.runtime.errors import RolloutFailed

    try:
        yield
    except KeyboardInterrupt:
        _print_error(command, Interrupted("interrupted"))
        raise typer.Exit(Interrupted.exit_code) from None
    except (RolloutFailed, OSError, RuntimeError, ValueError) as error:
        _print_error(command, error)
        raise typer.Exit(error.exit_code if isinstance(error, Interrupted) else code) from None


def _print_error(command: str, error: Exception) -> None:
    """Says what is wrong."""
    from rollout_server.inspection.escape import visible_lines

    text = _text(error)
    if is_json():
        where = {"file": getattr(error, "file", ""), "line": getattr(error, "line", 0)}
        typer.echo(json.dumps(error_document(command, "failed", text, **where)))
    else:
        typer.secho(visible_lines(f"rollout {command}: {text}"), fg=typer.colors.RED, err=True)


def _text(error: Exception) -> str:
    """What it says. The system's own errors say a number first, which tells nobody anything, and the file last."""
    if not isinstance(error, OSError) or type(error).__str__ is not OSError.__str__ or not error.strerror:
        return str(error)
    where = f"{error.filename}: " if error.filename is not None else ""
    hint = "; end what listens there, or choose another port" if error.errno == errno.EADDRINUSE else ""
    return f"{where}{error.strerror}{hint}"


def quiet_transformers() -> None:
    """Before it is imported: it would say that it misses PyTorch, which nobody needs here. A setting of the user's stays."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

"""Errors of commands: one line each, without a traceback and without warnings from libraries."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from rollout_server.cli.json_output import error_document, is_json


class Interrupted(RuntimeError):
    """The user pressed Ctrl-C."""

    exit_code = 130  # 128 + SIGINT, as shells report it


@contextmanager
def report_errors(command: str, code: int = 1) -> Iterator[None]:
    """Report errors that a user can fix (settings, ports, files, agents, tokenizers) and exit with `code`.

    The report is one line on standard error, or with `--json` an error document on standard output.
    """
    from rollout_server.runtime.errors import RolloutFailed

    try:
        yield
    except typer.Exit:  # a RuntimeError, which a command raises once it has reported
        raise
    except KeyboardInterrupt:
        _print_error(command, Interrupted("interrupted"))
        raise typer.Exit(Interrupted.exit_code) from None
    except (RolloutFailed, OSError, RuntimeError, ValueError) as error:
        _print_error(command, error)
        raise typer.Exit(error.exit_code if isinstance(error, Interrupted) else code) from None


def _print_error(command: str, error: Exception) -> None:
    """Print the error as one line, or as JSON."""
    from rollout_server.inspection.escape import visible_lines

    text = _text(error)
    if is_json():
        where = {"file": getattr(error, "file", ""), "line": getattr(error, "line", 0)}
        typer.echo(json.dumps(error_document(command, "failed", text, **where)))
    else:
        typer.secho(visible_lines(f"rollout {command}: {text}"), fg=typer.colors.RED, err=True)


def _text(error: Exception) -> str:
    """Return the error's text. For an `OSError` leave out the errno and put the file first."""
    if not isinstance(error, OSError) or type(error).__str__ is not OSError.__str__ or not error.strerror:
        return str(error)
    where = f"{error.filename}: " if error.filename is not None else ""
    hint = "; stop the process that listens there, or choose another port" if error.errno == errno.EADDRINUSE else ""
    return f"{where}{error.strerror}{hint}"


def quiet_transformers() -> None:
    """Silence the warning that PyTorch is missing. Call it before `transformers` is imported.

    A value that the user has set is kept.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

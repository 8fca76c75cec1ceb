"""`--json`: what a command answers on standard output, whichever way it ends, and nothing else there.

A command answers with one document, or one on each line where it tells of things as they happen. A command that fails answers
`{"error": {"command", "kind", "message", ...}}`. What is for people goes to standard error.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Annotated, Any, TextIO

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Answer with one JSON object.")]
_JSON: ContextVar[bool] = ContextVar("json", default=False)


def is_json() -> bool:
    """The command line that runs asks for JSON."""
    return _JSON.get()


@contextlib.contextmanager
def json_mode(arguments: Sequence[str]) -> Iterator[bool]:
    """Whether the arguments ask for JSON, and so does everything until the end."""
    before = arguments[: arguments.index("--")] if "--" in arguments else arguments
    token = _JSON.set("--json" in before)
    try:
        yield _JSON.get()
    finally:
        _JSON.reset(token)


class JsonOutput:
    """Where a command's documents go."""

    def __init__(self, out: TextIO, *, as_json: bool) -> None:
        self._out = out
        self.as_json = as_json

    def write(self, document: Mapping[str, Any]) -> None:
        """Writes the command's document, if JSON was asked for."""
        if self.as_json:
            self._out.write(_text(document, indent=2) + "\n")
            self._out.flush()

    def line(self, document: Mapping[str, Any]) -> None:
        """Writes one of several documents, each on a line."""
        if self.as_json:
            self._out.write(_text(document) + "\n")
            self._out.flush()


def _text(document: Mapping[str, Any], indent: int | None = None) -> str:
    """ASCII. Numbers that JSON does not know, which others may have sent, are null."""
    try:
        return json.dumps(document, indent=indent, allow_nan=False)
    except ValueError:
        known = json.loads(json.dumps(document), parse_constant=lambda _name: None)
        return json.dumps(known, indent=indent)


@contextlib.contextmanager
def open_output(*, as_json: bool) -> Iterator[JsonOutput]:
    """With JSON, whatever is written meanwhile goes to standard error, also by an author's code and by programs that it starts: the
    document stays whole.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that knows few characters is told of the others
            stream.reconfigure(errors="backslashreplace")
    if not as_json:
        yield JsonOutput(sys.stdout, as_json=False)
        return
    with _reserve_stdout(sys.stdout) as out, contextlib.redirect_stdout(sys.stderr):
        yield JsonOutput(out, as_json=True)


@contextlib.contextmanager
def _reserve_stdout(out: TextIO) -> Iterator[TextIO]:
    """Standard output, to which nobody else can write until the end of the block."""
    try:
        number, elsewhere = out.fileno(), sys.stderr.fileno()
    except OSError:  # no file of the system's, so other programs have none of it
        yield out
        return
    out.flush()
    duplicate = os.dup(number)
    os.dup2(elsewhere, number)
    try:
        with open(duplicate, "w", encoding="ascii", closefd=False) as own:
            yield own
    finally:
        os.dup2(duplicate, number)
        os.close(duplicate)


def error_document(command: str, kind: str, message: str, **more: object) -> dict[str, Any]:
    """What a command that failed answers. `kind` is "usage" for a wrong command line, else "failed"."""
    values = {key: value for key, value in more.items() if value}
    return {"error": {"command": command, "kind": kind, "message": message, **values}}

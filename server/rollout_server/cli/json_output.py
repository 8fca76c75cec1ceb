"""JSON output of commands (`--json`).

With `--json` standard output carries JSON only; text for people goes to standard error. A command prints one document, or one
document per line if it reports progress. A command that fails prints `{"error": {"command", "kind", "message", ...}}`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

if TYPE_CHECKING:
    from osmosis.rollout.v1.group_pb2 import Group
    from rollout_client import GroupOutcome, GroupResult, Rollout, RolloutEvent

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_JSON: ContextVar[bool] = ContextVar("json", default=False)


def is_json() -> bool:
    """Return whether the current command line has `--json`."""
    return _JSON.get()


@contextlib.contextmanager
def json_mode(arguments: Sequence[str]) -> Iterator[bool]:
    """Yield whether the arguments have `--json`; `is_json` returns the same within the block."""
    # Words after `--` are arguments, not flags.
    before = arguments[: arguments.index("--")] if "--" in arguments else arguments
    token = _JSON.set("--json" in before)
    try:
        yield _JSON.get()
    finally:
        _JSON.reset(token)


class JsonOutput:
    """Writes the JSON documents of a command. Without `--json` it writes nothing."""

    def __init__(self, out: TextIO, *, as_json: bool) -> None:
        self._out = out
        self.as_json = as_json

    def write(self, document: Mapping[str, Any]) -> None:
        """Write the command's only document, indented."""
        if self.as_json:
            self._out.write(_text(document, indent=2) + "\n")
            self._out.flush()

    def line(self, document: Mapping[str, Any]) -> None:
        """Write one of several documents on a line."""
        if self.as_json:
            self._out.write(_text(document) + "\n")
            self._out.flush()


def _text(document: Mapping[str, Any], indent: int | None = None) -> str:
    """Return the document as ASCII. NaN and infinities, which a trainer may have sent, become null."""
    try:
        return json.dumps(document, indent=indent, allow_nan=False)
    except ValueError:
        known = json.loads(json.dumps(document), parse_constant=lambda _name: None)
        return json.dumps(known, indent=indent)


@contextlib.contextmanager
def open_output(*, as_json: bool) -> Iterator[JsonOutput]:
    """Yield the output for a command's documents.

    With JSON, everything else that is printed within the block goes to standard error, so that it cannot corrupt the document. This
    includes output of the author's code and of subprocesses.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may not encode every character
            stream.reconfigure(errors="backslashreplace")
    if not as_json:
        yield JsonOutput(sys.stdout, as_json=False)
        return
    with _reserve_stdout(sys.stdout) as out, contextlib.redirect_stdout(sys.stderr):
        yield JsonOutput(out, as_json=True)


@contextlib.contextmanager
def _reserve_stdout(out: TextIO) -> Iterator[TextIO]:
    """Yield standard output for exclusive use; file descriptor 1 points to standard error within the block."""
    try:
        number, elsewhere = out.fileno(), sys.stderr.fileno()
    except OSError:  # not a file descriptor (a test's buffer), so no subprocess can write to it
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
    """Return the document of a failed command. `kind` is "usage" for a wrong command line, else "failed"."""
    values = {key: value for key, value in more.items() if value}
    return {"error": {"command": command, "kind": kind, "message": message, **values}}


def basic_fields(message: Rollout | Group | GroupOutcome | GroupResult) -> dict[str, Any]:
    """Return a message of the contract as the REST API returns it in view `basic`: without messages and tokens."""
    from osmosis.rollout.v1.rollout_service_pb2 import ROLLOUT_VIEW_BASIC
    from rollout_gateway.rest.proto_json import message_to_json

    return _plain(message_to_json(message, ROLLOUT_VIEW_BASIC))


def event_fields(event: RolloutEvent) -> dict[str, Any]:
    """Return an event as in GET /v1/rollouts/UID/events, with messages and without tokens."""
    from osmosis.rollout.v1.event_pb2 import EVENT_DETAIL_MESSAGES
    from rollout_gateway.rest.proto_json import event_json

    return _plain(event_json(event, EVENT_DETAIL_MESSAGES) or {"event": "unknown", "sequence": event.sequence})


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the raw JSON texts within the fields, such as messages, by their values."""
    import msgspec

    plain: dict[str, Any] = json.loads(msgspec.json.encode(fields))
    return plain

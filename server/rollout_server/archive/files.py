"""Saved rollouts in files: of the REST API, of exports and of evaluations. A file is indexed first, and read part by part later."""

from __future__ import annotations

import gzip
import json
import re
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import msgspec
from osmosis.rollout.v1 import rollout_service_pb2 as pb

from rollout_server.archive.archive import Recording, SavedRollout, Unreadable, basic
from rollout_server.archive.samples import rollout_of_samples
from rollout_server.evaluation.row_result import RowResult
from rollout_server.evaluation.row_rollout import rollout_of_result
from rollout_server.inspection.load import parse_rollout
from rollout_server.inspection.rest_json import event_of, is_rest_json, rollout_of, strict_json

MOST_BYTES: Final = 256 << 20
"""Size of one rollout in a file. A larger one would take several GB of memory."""
MOST_UNPACKED: Final = 8 << 30
"""Size of a compressed file when it is unpacked."""
_UID: Final = re.compile(r"[^A-Za-z0-9_-]+")
_GZIP: Final = b"\x1f\x8b"
_READABLE: Final = (
    "`rollout view` reads the JSON of GET /v1/rollouts/UID?view=full, a protobuf Rollout or Outcome, JSON lines of rollouts or of "
    "samples, and the results of `rollout eval`"
)
Parse = Callable[[Sequence[bytes]], Recording]
_Form = tuple[object, str, Parse]
"""The uid that a file has of a rollout, if any; a name of its place in the file; and how to read it."""


@dataclass(frozen=True, slots=True)
class FileRollout:
    """A rollout in parts of a file, which are (offset, length) in bytes. `parse` turns their contents into the rollout.

    `origin` is the uid that the file has, or without one the place in the file: other rollouts have others.
    """

    uid: str
    origin: str
    name: str
    open: Callable[[], IO[bytes]]
    parts: Sequence[tuple[int, int]]
    parse: Parse

    def read(self) -> Recording:
        """Read the rollout. Raises `Unreadable`."""
        try:
            with self.open() as file:
                contents = [_part(file, *each) for each in self.parts]
            found = self.parse(contents)
        except (OSError, ValueError) as error:
            raise Unreadable(f"{self.name}, rollout {self.uid}: {error}") from error
        except (
            TypeError,
            AttributeError,
            LookupError,
            ArithmeticError,
            RecursionError,
        ) as error:  # any JSON may be there
            raise Unreadable(f"{self.name}, rollout {self.uid}: a value has another type ({error})") from error
        found.rollout.uid = self.uid
        found.rollout.last_sequence = found.events[-1].sequence if found.events else 0
        return found

    def summary(self) -> pb.Rollout:
        """Read the rollout in the view "basic". Raises `Unreadable`."""
        return basic(self.read().rollout)


def saved_in(path: Path) -> list[SavedRollout]:
    """Return the rollouts in a file, in their order. Raises `Unreadable` if it has none."""
    try:
        opened = _opener(path)
        with opened() as file:
            found = [*_rollouts(file, path, opened)]
    except (OSError, EOFError, zlib.error) as error:
        raise Unreadable(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except RecursionError:
        raise Unreadable(f"{path}: its JSON is nested too deeply") from None
    except ValueError as error:
        raise Unreadable(f"{path}: {error}") from error
    if not found:
        raise Unreadable(f"{path} has no rollouts; {_READABLE}")
    found[0].read()  # the others are read when they are shown
    return found


def _opener(path: Path) -> Callable[[], IO[bytes]]:
    """Return how to open a file for reading. A compressed one is unpacked once, into a temporary file."""
    with path.open("rb") as file:
        if file.read(2) != _GZIP:
            return lambda: path.open("rb")
    unpacked = tempfile.NamedTemporaryFile(prefix="rollout-view-")  # noqa: SIM115 - lives as long as the function below
    with gzip.open(path) as packed:
        while piece := packed.read(1 << 20):
            if unpacked.tell() > MOST_UNPACKED:
                raise ValueError(f"it has more than {MOST_UNPACKED >> 30} GiB when it is unpacked")
            unpacked.write(piece)
    unpacked.flush()
    return lambda held=unpacked: Path(held.name).open("rb")  # type: ignore[misc]


def _part(file: IO[bytes], offset: int, length: int) -> bytes:
    file.seek(offset)
    content = file.read(length)
    if len(content) != length:
        raise ValueError("the file has become shorter meanwhile")
    return content


def _rollouts(file: IO[bytes], path: Path, opened: Callable[[], IO[bytes]]) -> Iterator[SavedRollout]:
    """Yield the rollouts of JSON lines, or that of the whole file."""
    lines = _lines(file)
    first = next(lines, None)
    value = None if first is None else _json_object(first[1])
    if first is None or value is None or (next(lines, None) is None and not _is_line(value)):
        yield _whole(file, path, opened)
        return
    file.seek(0)
    agent, samples = "", defaultdict[str, list[tuple[int, int]]](list)
    for number, (offset, line) in enumerate(_lines(file), start=1):
        value = _json_object(line)
        if value is None:
            if file.read(1) or line.endswith(b"\n"):
                raise ValueError(f"line {number} is not a JSON object; {_READABLE}")
            continue  # the trace of an interruption
        if isinstance(value.get("evaluation"), dict):  # the head of a results file
            agent = str(value["evaluation"].get("agent", ""))
            continue
        if "response_ids" in value:
            samples[str(value.get("uid") or "")].append((offset, len(line)))
            continue
        form = _line_form(value, number, agent, f"{_stem(path)}-")
        yield _rollout(form, path, opened, [(offset, len(line))])
    for uid, parts in samples.items():
        yield _rollout((uid, "samples", rollout_of_samples), path, opened, parts)


def _rollout(form: _Form, path: Path, opened: Callable[[], IO[bytes]], parts: Sequence[tuple[int, int]]) -> FileRollout:
    uid, place, parse = form
    named = str(uid) if uid else "-".join(filter(None, (_stem(path), place)))
    return FileRollout(_valid_uid(named), str(uid) if uid else f"{path}: {place}", str(path), opened, parts, parse)


def _stem(path: Path) -> str:
    return _valid_uid(path.name.partition(".")[0])[:40]


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their offsets. Raises ValueError for one of more than `MOST_BYTES`."""
    offset = 0
    while line := file.readline(MOST_BYTES + 1):
        if len(line) > MOST_BYTES:
            raise ValueError(f"it has a line of more than {MOST_BYTES >> 20} MiB, which is too large for one rollout")
        if line.strip():
            yield offset, line
        offset += len(line)


def _json_object(line: bytes, parse: Callable[[bytes], Any] = json.loads) -> dict[str, Any] | None:
    try:
        value = parse(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _is_line(value: Mapping[str, Any]) -> bool:
    """Return whether an object is a line of a file, and not a rollout, which may stand alone."""
    return "response_ids" in value or "evaluation" in value or "row" in value or "rollout" in value


def _line_form(value: Mapping[str, Any], number: int, agent: str, prefix: str) -> _Form:
    """Return the form of a line. `agent` and `prefix`: the agent of a results file, and what its group ids begin with."""
    place = f"line-{number}"
    if "row" in value and "repeat" in value:
        return (
            value.get("uid"),
            f"row-{value['row']}-{value['repeat']}",
            lambda parts: Recording(rollout_of_result(msgspec.json.decode(parts[0], type=RowResult), agent, prefix)),
        )
    if isinstance(value.get("rollout"), dict):
        return value["rollout"].get("uid"), place, lambda parts: _recorded(strict_json(parts[0]))
    if is_rest_json(value):
        return value.get("uid"), place, lambda parts: Recording(rollout_of(strict_json(parts[0])))
    found = parse_rollout(json.dumps(value).encode())
    return found.uid, place, lambda parts: Recording(_complete(parse_rollout(parts[0])))


def _whole(file: IO[bytes], path: Path, opened: Callable[[], IO[bytes]]) -> SavedRollout:
    size = file.seek(0, 2)
    if size > MOST_BYTES:
        raise ValueError(f"it has {size >> 20} MiB, which is too large for one rollout: at most {MOST_BYTES >> 20} MiB")
    found = _parse_whole([_part(file, 0, size)])
    return _rollout((found.rollout.uid, "", _parse_whole), path, opened, [(0, size)])


def _parse_whole(parts: Sequence[bytes]) -> Recording:
    value = _json_object(parts[0], strict_json) if parts[0].lstrip()[:1] == b"{" else None
    if value is not None and is_rest_json(value):
        return Recording(_complete(rollout_of(value)))
    if value is not None and isinstance(value.get("rollout"), dict) and is_rest_json(value["rollout"]):
        return _recorded(value)
    return Recording(_complete(parse_rollout(parts[0])))


def _recorded(value: Mapping[str, Any]) -> Recording:
    """Return a rollout with its events, as standalone documents have it."""
    return Recording(rollout_of(value["rollout"]), [event_of(each) for each in value.get("events", ())])


def _complete(rollout: pb.Rollout) -> pb.Rollout:
    """Fill in the state of a rollout of which only the outcome was saved."""
    if not rollout.state:
        rollout.state = pb.ROLLOUT_STATE_FINISHED if rollout.HasField("outcome") else pb.ROLLOUT_STATE_RUNNING
    return rollout


def _valid_uid(text: str) -> str:
    """Return a text as a uid: in the path of a link, further characters would mean something else."""
    return _UID.sub("-", text)[:64] or "rollout"

"""The results file: JSON lines. The first line describes the evaluation, each other line is the result of one rollout.

A line is written as soon as its rollout has ended. An interruption therefore loses only the rollouts that were running.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import msgspec

from rollout_server.authoring.author_traceback import AuthorError
from rollout_server.evaluation.row_result import Job, RowResult


class ResultsFile:
    """The results of one evaluation.

    Args:
        path: the file.
        evaluation: what was evaluated: agent, endpoint, sampling and so on, as JSON values.
        code: hash of the agent's code. A different one does not prevent `resume`, because an author may mend the agent.

    Attributes:
        results: results of completed rollouts whose rows have not changed, by row and repetition.
        changed_rows: numbers of the rows whose content differs from that of their results.
        code_changed: whether the results are of other code of the agent.
        other_uids: uids of the results in the file that this run neither repeats nor counts, such as those beyond `--limit`.
    """

    def __init__(self, path: Path, evaluation: Mapping[str, Any], code: str = "") -> None:
        self.path = path
        self.results: dict[tuple[int, int], RowResult] = {}
        self.changed_rows: list[int] = []
        self.code_changed = False
        self.other_uids: frozenset[str] = frozenset()
        self._header = {"evaluation": dict(evaluation), "code": code}
        self._file: IO[bytes] | None = None

    def exists(self) -> bool:
        """Whether the file exists and is not empty."""
        return self.path.exists() and self.path.stat().st_size > 0

    def resume(self, jobs: Sequence[Job]) -> None:
        """Read existing results. Raises `AuthorError` if the file belongs to another evaluation or is not a results file."""
        if not self.exists():
            return
        wanted = {(job.row.number, job.repeat): job.row.fingerprint for job in jobs}
        found: dict[tuple[int, int], RowResult] = {}
        other_uids: dict[tuple[int, int], str] = {}
        lines = self._lines()
        first = next(lines, None)
        if first is None:
            raise AuthorError("contains no results; --overwrite starts again", str(self.path))
        self._compare(first)
        for number, line in enumerate(lines, start=2):
            try:
                result = msgspec.json.decode(line, type=RowResult)
            except msgspec.MsgspecError as error:
                raise AuthorError(f"this is not a result: {error}", str(self.path), number) from None
            key = result.row, result.repeat  # if a rollout was retried, its last line decides
            if key in wanted:
                found[key] = result
            else:
                other_uids[key] = result.uid
        self.other_uids = frozenset(other_uids.values())
        same = {key for key, result in found.items() if result.fingerprint == wanted[key]}
        self.changed_rows = sorted({row for row, repeat in found if (row, repeat) not in same})
        self.results = {key: result for key, result in found.items() if key in same and result.finished}

    @contextmanager
    def open(self, *, anew: bool) -> Iterator[None]:
        """Open the file for writing results inside the `with` block. `anew` overwrites it, else results are appended."""
        anew = anew or not self.exists()
        with self.lock() as file:
            if anew:
                if self.exists():
                    file.truncate(0)
                self._write(json.dumps(self._header).encode())
            yield

    @contextmanager
    def lock(self) -> Iterator[IO[bytes]]:
        """Keep other processes from writing the file inside the `with` block. Raises `AuthorError` if one is writing it.

        Without a lock, two evaluations would overwrite or repeat each other's results. File systems that have no locks are used
        without one.
        """
        if self._file is not None:
            yield self._file
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            try:
                if self.path.is_file():  # /dev/null has no lock
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                text = "another process is writing these results; wait until it ends, or choose another file with --results"
                raise AuthorError(text, str(self.path)) from None
            except OSError:
                pass
            self._file = file
            try:
                yield file
            finally:
                self._file = None

    def write(self, result: RowResult) -> None:
        """Write one result."""
        self.results[result.row, result.repeat] = result
        self._write(msgspec.json.encode(asdict(result)))

    def _write(self, line: bytes) -> None:
        assert self._file is not None  # noqa: S101 - within `open`
        append(self._file, line + b"\n", self.path)

    def _lines(self) -> Iterator[bytes]:
        """Iterate over the complete lines. An incomplete last line is the trace of an interruption; it is removed from the file."""
        end = 0
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    os.truncate(self.path, end)
                    return
                end += len(line)
                yield line

    def _compare(self, line: bytes) -> None:
        try:
            header = json.loads(line)
            before = _leaves(header["evaluation"])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise AuthorError("is not a results file; choose another one with --results", str(self.path), 1) from None
        now = _leaves(json.loads(json.dumps(self._header["evaluation"])))
        different = [key for key in {**now, **before} if now.get(key) != before.get(key)]
        if different:
            changes = "; ".join(
                f"{key} was {_shown(before.get(key))} and is {_shown(now.get(key))} in this run" for key in different
            )
            text = f"these results are from another evaluation: {changes}"
            raise AuthorError(f"{text}; --overwrite replaces them, --results FILE writes another file", str(self.path))
        self.code_changed = header.get("code", self._header["code"]) != self._header["code"]


def append(file: IO[bytes], content: bytes, path: Path) -> None:
    """Append to a file of an evaluation. Raises `AuthorError` that names the file, for example if the disk is full."""
    try:
        file.write(content)
        file.flush()
    except OSError as error:
        text = f"cannot be written: {error.strerror}; what it contains stays: mend the cause and continue with --resume"
        with suppress(OSError):
            file.close()  # the rest of the content is in its buffer; writing it later would be the next error
        raise AuthorError(text, str(path)) from None


def _leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values that are not objects by their dotted paths, such as `endpoint.sampling.temperature`."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def _shown(value: object) -> str:
    return "not set" if value is None else json.dumps(value)

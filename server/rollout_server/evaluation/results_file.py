"""The results file: JSON lines. The first line describes the evaluation, each other line is the result of one rollout.

A line is written as soon as its rollout has ended. An interruption therefore loses only the rollouts that were running.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from rollout_server.authoring.author_traceback import AuthorError
from rollout_server.authoring.dataset import DatasetRow
from rollout_server.authoring.rollout_result import Result


@dataclass(frozen=True, slots=True)
class Job:
    """One rollout to run: a row, and the number of its repetition from 1."""

    row: DatasetRow
    repeat: int

    @property
    def rollout_id(self) -> str:
        """The rollout id, such as `row-3-1`."""
        return f"row-{self.row.number}-{self.repeat}"


def jobs_of(rows: Sequence[DatasetRow], repeats: int) -> list[Job]:
    """Return all rollouts to run, the first repetition of every row before the second, so early results cover all rows."""
    return [Job(row, repeat) for repeat in range(1, repeats + 1) for row in rows]


class ResultsFile:
    """The results of one evaluation.

    Args:
        path: the file.
        evaluation: what was evaluated: agent, endpoint, sampling and so on, as JSON values.

    Attributes:
        results: results of completed rollouts whose rows have not changed, by row and repetition.
    """

    def __init__(self, path: Path, evaluation: Mapping[str, Any]) -> None:
        self.path = path
        self.results: dict[tuple[int, int], Result] = {}
        self._evaluation = dict(evaluation)
        self._file: IO[bytes] | None = None

    def resume(self, jobs: Sequence[Job]) -> None:
        """Read existing results. Raises `AuthorError` if the file belongs to another evaluation or is not a results file."""
        if not self.path.exists() or not self.path.stat().st_size:
            return
        wanted = {(job.row.number, job.repeat): job.row.fingerprint for job in jobs}
        first, *others = self._lines()
        self._compare(first)
        for number, line in enumerate(others, start=2):
            try:
                result = msgspec.json.decode(line, type=Result)
            except msgspec.MsgspecError as error:
                raise AuthorError(f"this is not a result: {error}", str(self.path), number) from None
            if wanted.get((result.row, result.repeat)) == result.fingerprint:
                self.results[result.row, result.repeat] = result
        # Filtered after the loop: if a rollout was retried, its last line decides.
        self.results = {key: result for key, result in self.results.items() if result.finished}

    @contextmanager
    def open(self, *, anew: bool) -> Iterator[None]:
        """Open the file for writing results inside the `with` block. `anew` overwrites it, else results are appended."""
        anew = anew or not self.path.exists() or not self.path.stat().st_size
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("wb" if anew else "ab") as file:
            self._file = file
            if anew:
                self._write(json.dumps({"evaluation": self._evaluation}).encode())
            try:
                yield
            finally:
                self._file = None

    def write(self, result: Result) -> None:
        """Write one result."""
        self.results[result.row, result.repeat] = result
        self._write(msgspec.json.encode(asdict(result)))

    def _write(self, line: bytes) -> None:
        assert self._file is not None  # noqa: S101 - within `open`
        self._file.write(line + b"\n")
        self._file.flush()

    def _lines(self) -> list[bytes]:
        """Return the complete lines. An incomplete last line is the trace of an interruption; it is removed from the file."""
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(self.path, whole)
        lines = content[:whole].splitlines()
        if not lines:
            raise AuthorError("contains no results; --overwrite starts again", str(self.path))
        return lines

    def _compare(self, line: bytes) -> None:
        try:
            before = json.loads(line)["evaluation"]
        except (ValueError, KeyError, TypeError):
            raise AuthorError("is not a results file; choose another one with --results", str(self.path), 1) from None
        now = json.loads(json.dumps(self._evaluation))
        different = [key for key in now if now[key] != before.get(key)]
        if different:
            key = different[0]
            change = f"{key} was {json.dumps(before.get(key))} and is {json.dumps(now[key])} in this run"
            text = f"these results are from another evaluation: {change}"
            raise AuthorError(f"{text}; --overwrite replaces them, --results FILE writes another file", str(self.path))

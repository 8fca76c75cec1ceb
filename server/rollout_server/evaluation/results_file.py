"""The results file: JSON lines. The first line describes the evaluation, each other line is the result of one rollout.

A line is written as soon as its rollout has ended. An interruption therefore loses only the rollouts that were running.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    """

    def __init__(self, path: Path, evaluation: Mapping[str, Any], code: str = "") -> None:
        self.path = path
        self.results: dict[tuple[int, int], RowResult] = {}
        self.changed_rows: list[int] = []
        self.code_changed = False
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
        first, *others = self._lines()
        self._compare(first)
        for number, line in enumerate(others, start=2):
            try:
                result = msgspec.json.decode(line, type=RowResult)
            except msgspec.MsgspecError as error:
                raise AuthorError(f"this is not a result: {error}", str(self.path), number) from None
            if (result.row, result.repeat) in wanted:
                found[result.row, result.repeat] = result  # if a rollout was retried, its last line decides
        same = {key for key, result in found.items() if result.fingerprint == wanted[key]}
        self.changed_rows = sorted({row for row, repeat in found if (row, repeat) not in same})
        self.results = {key: result for key, result in found.items() if key in same and result.finished}

    @contextmanager
    def open(self, *, anew: bool) -> Iterator[None]:
        """Open the file for writing results inside the `with` block. `anew` overwrites it, else results are appended."""
        anew = anew or not self.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("wb" if anew else "ab") as file:
            self._file = file
            if anew:
                self._write(json.dumps(self._header).encode())
            try:
                yield
            finally:
                self._file = None

    def write(self, result: RowResult) -> None:
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


def _leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values that are not objects by their dotted paths, such as `endpoint.sampling.temperature`."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def _shown(value: object) -> str:
    return "not set" if value is None else json.dumps(value)

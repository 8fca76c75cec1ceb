"""Evaluation datasets in JSON lines, CSV or Parquet: prompts, ground truth and further columns."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from rollout_server.authoring.author_traceback import AuthorError

COLUMNS: Final = ("system_prompt", "user_prompt", "ground_truth")
FORMS: Final = (".jsonl", ".csv", ".parquet")
MOST_BYTES: Final = 2**30
MOST_ROWS: Final = 1_000_000
_LONGEST_FIELD: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """One row of a dataset.

    Args:
        number: from 1.
        system_prompt: empty for none.
        user_prompt: never blank.
        metadata: the ground truth, and all columns that are not prompts.
        fingerprint: hash of the content; differs if the row changed.
    """

    number: int
    system_prompt: str
    user_prompt: str
    metadata: Mapping[str, Any]
    fingerprint: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages that a rollout of the row starts with. An empty system prompt adds no message."""
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": self.user_prompt}]


def read_rows(path: Path, names: Mapping[str, str] | None = None) -> list[DatasetRow]:
    """Read the rows of a file.

    Args:
        path: a file that ends in .jsonl, .csv or .parquet.
        names: the file's names of the standard columns, where they differ; an empty name means that the column does not exist.

    Raises:
        AuthorError: with file and line, if the file or a row is invalid.
        OSError: if the file cannot be read.
    """
    form = path.suffix.lower()
    if form not in FORMS:
        raise AuthorError(f"the name of a dataset must end in {', '.join(FORMS)}", str(path))
    if path.stat().st_size > MOST_BYTES:
        raise AuthorError(f"has more than {MOST_BYTES} bytes; split it", str(path))
    readers = {".jsonl": _json_lines, ".csv": _csv, ".parquet": _parquet}
    reader = _RowReader(path, {column: column for column in COLUMNS} | dict(names or {}))
    rows = [reader.row(number, line, fields) for number, (line, fields) in enumerate(readers[form](path), start=1)]
    if not rows:
        raise AuthorError("contains no row", str(path))
    return rows


def column_names(pairs: Iterable[str]) -> dict[str, str]:
    """Parse COLUMN=NAME pairs into a dictionary of the file's names by standard column. Raises `AuthorError`."""
    split = [pair.partition("=") for pair in pairs]
    for pair, (column, sign, _) in zip(pairs, split, strict=True):
        if not sign or column not in COLUMNS:
            raise AuthorError(f"--column {pair!r} must be COLUMN=NAME, with COLUMN one of {', '.join(COLUMNS)}")
    return {column: name for column, _, name in split}


@dataclass(frozen=True, slots=True)
class _RowReader:
    path: Path
    names: Mapping[str, str]

    def row(self, number: int, line: int, fields: Mapping[str, Any]) -> DatasetRow:
        if number > MOST_ROWS:
            self._fail(line, f"has more than {MOST_ROWS} rows; split it")
        missing = [name for name in self.names.values() if name and name not in fields]
        if missing:
            present = ", ".join(map(str, fields)) or "none"
            column = next(column for column, name in self.names.items() if name == missing[0])
            named = f"the column {missing[0]} is" if len(missing) == 1 else f"the columns {', '.join(missing)} are"
            hint = f"use --column {column}=NAME for another name" + (
                f", or --column {column}= for none" if column != "user_prompt" else ""
            )
            self._fail(line, f"{named} missing (columns: {present}); {hint}")
        values = {column: fields[name] if name else None for column, name in self.names.items()}
        system = self._text(line, "system_prompt", values["system_prompt"])
        user = self._text(line, "user_prompt", values["user_prompt"])
        if not user.strip():
            self._fail(line, f"{self.names['user_prompt'] or 'user_prompt'} is empty; every row needs a user prompt")
        more = {key: value for key, value in fields.items() if key not in self.names.values()}
        if "ground_truth" in more and self.names["ground_truth"]:
            self._fail(line, "there is a column ground_truth beside the one that --column names for it; rename one")
        metadata = {"ground_truth": values["ground_truth"], **more} if self.names["ground_truth"] else more
        try:
            content = json.dumps([system, user, metadata], sort_keys=True, allow_nan=False, ensure_ascii=False).encode()
        except (ValueError, TypeError, RecursionError) as error:
            self._fail(line, f"a value cannot be sent as JSON: {error}")
        return DatasetRow(number, system, user, metadata, hashlib.sha256(content).hexdigest()[:16])

    def _text(self, line: int, column: str, value: object) -> str:
        if value is None:
            return ""
        if not isinstance(value, str):
            self._fail(line, f"{self.names[column]} must be a string, not {type(value).__name__}")
        return value

    def _fail(self, line: int, text: str) -> NoReturn:
        raise AuthorError(text, str(self.path), line)


def _json_lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not content.strip():
                continue
            try:
                value = json.loads(content.decode(), parse_constant=_no_number)
            except (ValueError, RecursionError) as error:
                raise AuthorError(f"this line is not JSON: {error}", str(path), number) from None
            if not isinstance(value, dict):
                raise AuthorError("this line is not a JSON object", str(path), number)
            yield number, value


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


def _csv(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise AuthorError(f"is not UTF-8: {error.reason} at byte {error.start}", str(path)) from None
    before = csv.field_size_limit(_LONGEST_FIELD)  # Python's default is 128 KiB; prompts can be longer
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        names = next(reader, [])
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise AuthorError(f"more than one column is called {', '.join(map(repr, doubled))}", str(path), 1)
        for values in reader:
            if not values:
                continue
            if len(values) != len(names):
                text = f"this row has {len(values)} values, the first line names {len(names)} columns"
                raise AuthorError(text, str(path), reader.line_num)
            yield reader.line_num, dict(zip(names, values, strict=True))
    except csv.Error as error:
        raise AuthorError(f"this is not CSV: {error}", str(path), reader.line_num) from None
    finally:
        csv.field_size_limit(before)


def _parquet(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise AuthorError('Parquet needs pip install "rollout-server[parquet]"', str(path)) from None
    import pyarrow as pa

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for fields in batch.to_pylist():
                    yield 0, {name: _plain(value) for name, value in fields.items()}
    except (pa.ArrowException, OSError) as error:
        raise AuthorError(f"this is not a Parquet file: {error}", str(path)) from None


def _plain(value: object) -> object:
    """Convert a value to JSON types. NaN and infinite numbers become None, because tables write missing values as NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, str | int | float):
        return value
    return value.hex() if isinstance(value, bytes) else str(value)  # dates, times and exact decimals

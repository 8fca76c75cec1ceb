"""Readers of JSON lines, JSON and CSV. Each yields the line and the fields of each row; JSON has no lines, so they are 0."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from rollout_server.authoring.author_traceback import AuthorError
from rollout_server.core.message import MalformedMessage, parse_json

MAX_LINE_BYTES: Final = 64 * 1024 * 1024
MAX_JSON_BYTES: Final = 256 * 1024 * 1024
"""Maximum size of a JSON file, which is parsed as a whole."""
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


def json_lines_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the rows of a JSON lines file. Raises `AuthorError`."""
    with path.open("rb") as file:
        for number, line in _lines(path, file):
            if not line.strip():
                continue
            try:
                value = parse_json(line.decode())
            except (ValueError, RecursionError) as error:
                raise AuthorError(f"this line is not JSON: {error}", str(path), number) from None
            if not isinstance(value, dict):
                raise AuthorError("this line is not a JSON object", str(path), number)
            yield number, value


def json_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the rows of a JSON file: of a list of objects, or of an object whose only list holds the rows. Raises `AuthorError`."""
    with path.open("rb") as file:
        content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise AuthorError(f"has more than {MAX_JSON_BYTES:,} bytes; convert it to JSON lines", str(path))
    try:
        value = parse_json(content.removeprefix(_BYTE_ORDER_MARK).decode())
    except (MalformedMessage, UnicodeDecodeError, RecursionError) as error:
        hint = "; JSON lines need the name .jsonl" if "Extra data" in str(error) else ""
        raise AuthorError(f"is not JSON: {error}{hint}", str(path)) from None
    if isinstance(value, dict):
        lists = [key for key, each in value.items() if isinstance(each, list)]
        if len(lists) != 1:
            found = ", ".join(lists) or "none"
            raise AuthorError(
                f"must be a list of rows, or an object with one list of rows; lists in it: {found}", str(path)
            )
        value = value[lists[0]]
    if not isinstance(value, list):
        raise AuthorError("must be a list of rows, or an object with one list of rows", str(path))
    for number, row in enumerate(value, start=1):
        if not isinstance(row, dict):
            raise AuthorError(f"row {number}: must be an object, not {type(row).__name__}", str(path))
        yield 0, row


def csv_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the rows of a CSV file, whose first line names the columns. All values are texts. Raises `AuthorError`."""
    before = csv.field_size_limit(MAX_LINE_BYTES)  # Python's default is 128 KiB; prompts can be longer
    with path.open("rb") as file:
        reader = csv.reader(_texts(path, file), strict=True)
        try:
            names = next(reader, [])
            doubled = sorted({name for name in names if names.count(name) > 1})
            if doubled:
                text = f"more than one column is called {', '.join(map(repr, doubled))}; rename one"
                raise AuthorError(text, str(path), 1)
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


def _texts(path: Path, file: IO[bytes]) -> Iterator[str]:
    for number, line in _lines(path, file):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            text = f"this line is not UTF-8: {error.reason} at byte {error.start}; save the file as UTF-8"
            raise AuthorError(text, str(path), number) from None


def _lines(path: Path, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield numbers and contents of lines, without a byte order mark. Reads at most `MAX_LINE_BYTES` at once."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise AuthorError(f"this line has more than {MAX_LINE_BYTES:,} bytes; shorten the row", str(path), number)
        yield number, line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line

"""Read the entries of a file: the lines of JSON Lines, one JSON document, or the rows of Parquet.

What cannot be read becomes an entry with a fault, so that one broken line hides no other line. At most one line, or a small batch
of a Parquet file, is in memory.
"""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

_LONGEST: Final = 64 * 2**20
"""Largest line, and largest JSON document of several lines, in bytes. Parsed, it needs several times as much memory."""
_BATCH: Final = 16
"""Rows of a Parquet file that are decoded together."""
_FOREIGN: Final = {
    b"\x1f\x8b": "the file is compressed with gzip; unpack it first",
    b"PK\x03\x04": "the file is a zip archive; unpack it first",
    b"\x28\xb5\x2f\xfd": "the file is compressed with zstd; unpack it first",
    b"\xff\xfe": "the file is encoded in UTF-16; JSON must be UTF-8",
    b"\xfe\xff": "the file is encoded in UTF-16; JSON must be UTF-8",
}


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One line or row.

    Args:
        number: number of the line or row, from 1.
        value: the parsed value.
        fault: why it cannot be read; empty if `value` is valid.
    """

    number: int
    value: Any = None
    fault: str = ""


def read_entries(path: Path) -> Iterator[FileEntry]:
    """Yield the entries of a file. Empty lines are skipped, but counted.

    Raises:
        OSError: the file cannot be opened or read.
        ValueError: the file is Parquet and pyarrow is missing; the text names the extra.
    """
    with path.open("rb") as file:
        start = file.read(4)
        if start == b"PAR1":
            yield from _parquet(path)
            return
        foreign = next((text for magic, text in _FOREIGN.items() if start.startswith(magic)), "")
        if foreign:
            yield FileEntry(1, fault=foreign)
            return
        yield from _json(start, file)


def _json(start: bytes, file: IO[bytes]) -> Iterator[FileEntry]:
    """Yield the entries of a JSON file that begins with the bytes `start`.

    If the first line is not JSON by itself, the file may be one document over several lines.
    """
    head = start if b"\n" in start else start + file.readline(_LONGEST)
    first = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if first and _parse(1, first).fault:
        head += file.read(max(0, _LONGEST - len(head)))
        document = FileEntry(1, fault="too long") if len(head) >= _LONGEST else _parse(1, head)
        if not document.fault:
            yield document
            return
    lines, number = _ResumedFile(head, file), 0
    while line := lines.readline():
        number += 1
        if len(line) > _LONGEST:
            while line and not line.endswith(b"\n"):
                line = lines.readline()
            yield FileEntry(number, fault=f"the line is longer than {_LONGEST >> 20} MiB; write one sample per line")
        elif line.strip():
            yield _parse(number, line)


class _ResumedFile:
    """A file of which the first bytes were read before. Files that cannot seek, such as pipes, are read too."""

    def __init__(self, head: bytes, rest: IO[bytes]) -> None:
        self._head, self._rest = io.BytesIO(head), rest

    def readline(self) -> bytes:
        """Return the next line, or the first `_LONGEST` + 1 bytes of it; empty at the end of the file."""
        line = self._head.readline(_LONGEST + 1)
        if line.endswith(b"\n") or len(line) > _LONGEST:
            return line
        return line + self._rest.readline(_LONGEST + 1 - len(line))


def _parse(number: int, content: bytes) -> FileEntry:
    """Parse JSON. NaN and Infinity, which JSON does not have, are accepted here and are found later at their index."""
    try:
        return FileEntry(number, json.loads(content.decode("utf-8-sig")))
    except UnicodeDecodeError as error:
        return FileEntry(number, fault=f"not UTF-8 at byte {error.start}")
    except RecursionError:
        return FileEntry(number, fault="the JSON is nested too deeply")
    except ValueError as error:
        return FileEntry(number, fault=f"not JSON: {error}")


def _parquet(path: Path) -> Iterator[FileEntry]:
    try:
        arrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ValueError(f'{path}: Parquet files need pyarrow: pip install "rollout-server[parquet]"') from None
    number = 0
    try:
        with parquet.ParquetFile(str(path)) as file:
            for batch in file.iter_batches(batch_size=_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield FileEntry(number, row)
    except (arrow.ArrowException, OSError, ValueError) as error:
        text = " ".join(str(error).split())[:200]
        yield FileEntry(number + 1, fault=f"the Parquet file cannot be read from here on: {text}")

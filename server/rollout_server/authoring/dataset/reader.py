"""Reading of a dataset: its columns are found in the first row, its rows are shuffled and limited as they are read."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Final

from rollout_server.agent import Agent
from rollout_server.authoring.author_traceback import AuthorError
from rollout_server.authoring.dataset.columns import DatasetColumns
from rollout_server.authoring.dataset.convert import MAX_ROWS, SizedRow, convert_rows
from rollout_server.authoring.dataset.provided import provided_dataset
from rollout_server.authoring.dataset.row import DatasetRow, SourceRow
from rollout_server.authoring.dataset.sources import dataset_files, source_rows

MAX_BYTES: Final = 2**30
"""Maximum size of all rows that are kept, as JSON."""
DEFAULT_SPLIT: Final = "test"
"""The split that an agent's `dataset` is called with if none is chosen."""


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """What to read of a dataset.

    Args:
        names: names of columns by standard column, see `column_names`; others are found by their names.
        split: name of the split; empty if there are no splits or there is only one.
        system_prompt: replaces the system prompt of every row; empty for none. None keeps them.
        shuffle: seed of the order; None keeps the order. The order depends only on the seed and the number of each row.
        offset: rows to skip, after shuffling.
        limit: maximum number of rows after that; None for all.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    split: str = ""
    system_prompt: str | None = None
    shuffle: int | None = None
    offset: int = 0
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset that was read: its name, its rows, at least one, and which columns their parts come from."""

    name: str
    rows: Sequence[DatasetRow]
    columns: DatasetColumns
    options: DatasetOptions

    def description(self) -> str:
        """Describe in one line what was taken from where."""
        parts = [self.columns.description()]
        if not self.columns.ground_truth:
            parts.append("no ground truth")
        if self.options.system_prompt is not None:
            parts.append("system_prompt from --system-prompt" if self.options.system_prompt else "no system prompt")
        if self.options.shuffle is not None:
            parts.append(f"shuffled with seed {self.options.shuffle}")
        rows = f"{len(self.rows)} row{'s' if len(self.rows) > 1 else ''}"
        return f"dataset {self.name}: {rows}; {', '.join(parts)}"


def read_dataset(source: Path | Agent, options: DatasetOptions = DatasetOptions()) -> Dataset:
    """Read a dataset.

    Files are read row by row, and no further than `limit` requires. With `shuffle`, only the rows that may be chosen are kept.

    Args:
        source: a file, a directory of a dataset, or an agent that provides one.
        options: what to read.

    Raises:
        AuthorError: with file and line or row, if the dataset or a row is invalid.
        OSError: if a file cannot be read.
    """
    name, rows = _open(source, options.split)
    where = name if isinstance(source, Path) else f"dataset {name}"
    first = next(rows, None)
    if first is None:
        raise AuthorError("contains no row", where)
    try:
        columns = DatasetColumns.detect(first.fields, options.names)
    except AuthorError as error:
        raise first.error(error.text) from None
    sized = convert_rows(chain([first], rows), columns, options.system_prompt)
    chosen = _choose(sized, options, where)
    if not chosen:
        raise AuthorError(f"contains no row after the first {options.offset:,}, which --offset skips", where)
    return Dataset(name, chosen, columns, options)


def _open(source: Path | Agent, split: str) -> tuple[str, Iterator[SourceRow]]:
    """Return the name of a dataset and its rows."""
    if isinstance(source, Path):
        return f"{source}{f' [{split}]' if split else ''}", source_rows(source, split)
    found = provided_dataset(source, split or DEFAULT_SPLIT)
    if isinstance(found, Path):
        # The agent has chosen a file of the split already; a directory may contain further ones.
        wanted = (split or DEFAULT_SPLIT) if found.is_dir() and _has_splits(found) else ""
        return f"{found}{f' [{wanted}]' if wanted else ''} of agent {source.name}", source_rows(found, wanted)
    return f"of agent {source.name} [{split or DEFAULT_SPLIT}]", found


def _has_splits(path: Path) -> bool:
    try:
        dataset_files(path)
    except AuthorError:
        return True
    return False


def _choose(rows: Iterable[SizedRow], options: DatasetOptions, name: str) -> list[DatasetRow]:
    end = None if options.limit is None else options.offset + options.limit
    if options.shuffle is None:
        return [each.row for each in _bounded(islice(rows, options.offset, end), name)]
    return _shuffled(rows, options.shuffle, MAX_ROWS if end is None else end, name)[options.offset :]


def _bounded(rows: Iterable[SizedRow], name: str) -> Iterator[SizedRow]:
    total = 0
    for each in rows:
        total += each.size
        _check_total(total, name)
        yield each


def _check_total(total: int, name: str) -> None:
    if total > MAX_BYTES:
        raise AuthorError(f"its rows have more than {MAX_BYTES:,} bytes; use --limit, or split it", name)


def _shuffled(rows: Iterable[SizedRow], seed: int, most: int, name: str) -> list[DatasetRow]:
    """Return the first `most` rows in the order of the seed. Never holds more than these."""
    heap: list[tuple[int, int, SizedRow]] = []  # the row that is last in the order comes first
    total = 0
    for each in rows:
        number = each.row.number
        # A hash and not `random.shuffle`: the same on all platforms and versions, and known before all rows are read.
        digest = hashlib.sha256(f"{seed}:{number}".encode()).digest()
        item = (-int.from_bytes(digest), number, each)
        total += each.size
        if len(heap) < most:
            heapq.heappush(heap, item)
        else:
            total -= heapq.heappushpop(heap, item)[2].size
        _check_total(total, name)
    return [each.row for _, _, each in sorted(heap, key=lambda item: -item[0])]

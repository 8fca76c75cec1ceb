"""The rows of a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rollout_server.authoring.dataset import DatasetOptions, DatasetRow, read_dataset


def read_rows(path: Path, names: Mapping[str, str] | None = None) -> Sequence[DatasetRow]:
    """Read all rows of a file or a directory. `names` and errors are those of `read_dataset`."""
    return read_dataset(path, DatasetOptions(names or {})).rows

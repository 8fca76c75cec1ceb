"""Datasets: rows with prompt, ground truth and metadata, from files, directories of splits, or the agent itself."""

from __future__ import annotations

from rollout_server.authoring.dataset.columns import DatasetColumns, column_names
from rollout_server.authoring.dataset.reader import Dataset, DatasetOptions, read_dataset
from rollout_server.authoring.dataset.row import DatasetRow

__all__ = [
    "Dataset",
    "DatasetColumns",
    "DatasetOptions",
    "DatasetRow",
    "column_names",
    "read_dataset",
]

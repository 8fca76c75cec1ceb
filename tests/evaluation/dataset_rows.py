"""Rows of a dataset, read from a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout_server.authoring.dataset import DatasetRow

from tests.support.datasets import read_rows


def rows_of(folder: Path, *columns: Mapping[str, Any]) -> list[DatasetRow]:
    """Write a row for each mapping, with further columns, and read the rows."""
    prompts = {"system_prompt": "", "user_prompt": "hi", "ground_truth": None}
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({**prompts, **more}) + "\n" for more in columns))
    return list(read_rows(path))

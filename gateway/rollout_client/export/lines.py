"""Samples as JSON lines: UTF-8, one sample on each line, in the form of `to_dict`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from os import PathLike

from rollout_client.export.plain import from_dict, to_dict
from rollout_client.samples import TrainingSample


def write_jsonl(samples: Iterable[TrainingSample], path: str | PathLike[str], *, append: bool = False) -> int:
    """Writes samples to a file, over what it held unless they are to be appended. Returns how many.

    Raises ValueError for a number that JSON has no word for (NaN, infinities). What was written before it stays.
    """
    count = 0
    with open(path, "a" if append else "w", encoding="utf-8", newline="\n") as file:
        for sample in samples:
            file.write(_line(sample))
            count += 1
    return count


def read_jsonl(path: str | PathLike[str]) -> Iterator[TrainingSample]:
    """Reads samples from a file, one at a time; empty lines are skipped.

    Raises ValueError with the number of the line that holds no sample.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _sample(line, f"{path}, line {number}")


def _line(sample: TrainingSample) -> str:
    try:
        return json.dumps(to_dict(sample), ensure_ascii=True, allow_nan=False, separators=(",", ":")) + "\n"
    except ValueError as error:
        raise ValueError(f"rollout {sample.uid!r}, segment {sample.segment_id!r}: {error}") from None


def _sample(line: bytes, where: str) -> TrainingSample:
    try:
        return from_dict(json.loads(line.decode()))
    except RecursionError:
        raise ValueError(f"{where}: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None

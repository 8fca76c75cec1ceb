"""Samples as Parquet files: one row per sample, columns named as in `to_dict`. Needs the extra `rollout-server[parquet]`."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from itertools import islice
from os import PathLike, fspath
from typing import Any, Final

from rollout_client.export.json_lines import from_dict, to_dict
from rollout_client.samples import TrainingSample

_ROW_GROUP: Final = 1024
"""Most samples of one row group; they are in memory together."""


def write_parquet(samples: Iterable[TrainingSample], path: str | PathLike[str]) -> int:
    """Write samples to a Parquet file, replacing its content, and return how many were written: all, with `trainable`.

    Token ids are stored as int32, the mask as int8, and logprobs as float32, the precision in which the server sends them. Samples
    are written in row groups as the iterable yields them. If it raises, earlier samples stay in the file.

    Raises ImportError that names the extra if pyarrow is missing.
    """
    arrow = _arrow()
    schema, rows, count = _schema(arrow), map(_row, samples), 0
    with importlib.import_module("pyarrow.parquet").ParquetWriter(fspath(path), schema) as file:
        while group := list(islice(rows, _ROW_GROUP)):
            file.write_table(arrow.Table.from_pylist(group, schema=schema))
            count += len(group)
    return count


def read_parquet(path: str | PathLike[str]) -> list[TrainingSample]:
    """Return the samples of a file that `write_parquet` wrote.

    Raises:
        ImportError: pyarrow is missing; the text names the extra.
        ValueError: the file is not Parquet, lacks a column, or a row is not a valid sample.
    """
    arrow = _arrow()
    # Not read_table: it reads `name=value` in a path as a partition column.
    with importlib.import_module("pyarrow.parquet").ParquetFile(fspath(path)) as file:
        columns, found = _schema(arrow).names, file.schema_arrow.names
        if missing := [name for name in columns if name not in found]:
            raise ValueError(f"{path} contains no samples: it has no column {missing[0]!r}")
        rows = file.read(columns=columns).to_pylist()
    return [_sample(row, f"{path}, row {number}") for number, row in enumerate(rows, 1)]


def _arrow() -> Any:
    try:
        return importlib.import_module("pyarrow")
    except ImportError:
        raise ImportError('Parquet files need pyarrow: pip install "rollout-server[parquet]"') from None


def _schema(arrow: Any) -> Any:
    """Return the schema. Token ids are below 2^31, so int32 holds them."""
    text, integer, number = arrow.string(), arrow.int64(), arrow.float64()
    positions = {"turn": integer, "start": integer, "stop": integer}
    policy = {"policy_version": text, "policy_step": integer}
    span = arrow.struct({"author": text, "reason": text, **positions, **policy})
    texts = dict.fromkeys(("field", "expected", "found", "api", "client_agent"), text)
    parting = arrow.struct({"message": integer, **texts})
    columns = {
        "segment_id": text,
        "prompt_ids": arrow.list_(arrow.int32()),
        "response_ids": arrow.list_(arrow.int32()),
        "response_mask": arrow.list_(arrow.int8()),
        "logprobs": arrow.list_(arrow.float32()),
        "spans": arrow.list_(span),
        "kind": text,
        "parent_id": text,
        "parent_tokens": integer,
        "verified": arrow.bool_(),
        "uid": text,
        "rollout_id": text,
        "group_id": text,
        "end": text,
        "reason": text,
        "truncated": arrow.bool_(),
        "reward": number,
        "scores": arrow.list_(arrow.struct([("name", text), ("value", number)])),
        "completion_ms": number,
        "tool_ms": number,
        "failure_class": text,
        "role": text,
        "trainable": arrow.bool_(),
        "untrainable_reason": text,
        "turn_rewards": arrow.list_(arrow.struct([("turn", integer), ("value", number)])),
        "model": text,
        "parting": parting,
        "part": integer,
    }
    return arrow.schema(columns)


def _row(sample: TrainingSample) -> dict[str, Any]:
    row = to_dict(sample)
    return row | {"scores": [{"name": name, "value": value} for name, value in row["scores"].items()]}


def _sample(row: Mapping[str, Any], where: str) -> TrainingSample:
    scores = {score["name"]: score["value"] for score in row["scores"] or ()}
    try:
        return from_dict({**row, "scores": scores})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None

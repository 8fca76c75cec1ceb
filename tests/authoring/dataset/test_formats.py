"""Datasets: three formats with the same rows, and errors for invalid files."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rollout_server.authoring.author_traceback import AuthorError
from rollout_server.authoring.dataset import DatasetRow, column_names, read_rows

LONG = "long " * 60_000
ROWS: list[dict[str, str]] = [
    {"system_prompt": "Be brief.", "user_prompt": 'Say "hi",\nthen go.', "ground_truth": "hi", "kind": "ä"},
    {"system_prompt": "", "user_prompt": LONG, "ground_truth": "7", "kind": "b"},
]


def json_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\ufeff" + "\n\n".join(map(json.dumps, rows)) + "\n")
    return path


def comma_separated(path: Path, rows: list[dict[str, Any]]) -> Path:
    quoted = [
        [
            json.dumps(value, ensure_ascii=False)[1:-1].replace('\\"', '""').replace("\\n", "\n")
            for value in row.values()
        ]
        for row in rows
    ]
    lines = [",".join(rows[0])] + [",".join(f'"{value}"' for value in values) for values in quoted]
    path.write_text("\ufeff" + "\r\n".join(lines) + "\r\n", newline="")
    return path


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


FORMS = {"d.jsonl": json_lines, "d.csv": comma_separated, "d.parquet": parquet}
Write = Callable[[Path, list[dict[str, Any]]], Path]


@pytest.mark.parametrize(("name", "write"), FORMS.items(), ids=FORMS.keys())
def test_each_form_gives_the_same_rows(tmp_path: Path, name: str, write: Write) -> None:
    first, second = read_rows(write(tmp_path / name, ROWS))
    assert first == DatasetRow(
        1, "Be brief.", ROWS[0]["user_prompt"], {"ground_truth": "hi", "kind": "ä"}, first.fingerprint
    )
    assert [message["role"] for message in first.messages] == ["system", "user"]
    assert second.messages == [{"role": "user", "content": LONG}]
    [again] = read_rows(write(tmp_path / f"again.{name}", ROWS[:1]))
    assert again.fingerprint == first.fingerprint != second.fingerprint


@pytest.mark.parametrize(("name", "write"), FORMS.items(), ids=FORMS.keys())
@pytest.mark.parametrize("column", ["system_prompt", "user_prompt", "ground_truth"])
def test_a_missing_column_is_named(tmp_path: Path, name: str, write: Write, column: str) -> None:
    rows = [{key: value for key, value in row.items() if key != column} for row in ROWS]
    with pytest.raises(
        AuthorError, match=rf"the column {column} is missing \(columns: .*kind\); use --column {column}=NAME"
    ):
        read_rows(write(tmp_path / name, rows))


def test_columns_have_other_names_or_are_none(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "d.jsonl", [{"question": "1+1?", "answer": 2, "more": [1, None]}])
    names = column_names(["user_prompt=question", "ground_truth=answer", "system_prompt="])
    [row] = read_rows(path, names)
    assert (row.system_prompt, row.user_prompt, row.metadata) == ("", "1+1?", {"ground_truth": 2, "more": [1, None]})
    for wrong in ("user_prompt", "prompt=question"):
        with pytest.raises(AuthorError, match="COLUMN=NAME"):
            column_names([wrong])


def test_values_of_tables_become_json(tmp_path: Path) -> None:
    rows = [
        {
            "system_prompt": None,
            "user_prompt": "?",
            "ground_truth": float("nan"),
            "day": date(2024, 2, 3),
            "raw": b"\xff",
        }
    ]
    [row] = read_rows(parquet(tmp_path / "d.parquet", rows))
    assert row.metadata == {"ground_truth": None, "day": "2024-02-03", "raw": "ff"}
    assert row.system_prompt == ""


GOOD = '{"system_prompt": "", "user_prompt": "?", "ground_truth": 1}\n'
WRONG = {
    "broken": ("d.jsonl", GOOD + "{\n", "d.jsonl:2: this line is not JSON"),
    "no_object": ("d.jsonl", GOOD + "[]\n", "d.jsonl:2: this line is not a JSON object"),
    "not_finite": ("d.jsonl", GOOD.replace("1}", "NaN}"), "d.jsonl:1: this line is not JSON: NaN"),
    "half_a_pair": ("d.jsonl", GOOD.replace("?", "\\ud800"), "d.jsonl:1: a value cannot be sent as JSON"),
    "deep": ("d.jsonl", GOOD.replace("1}", "[" * 100_000 + "]" * 100_000 + "}"), "d.jsonl:1: this line is not JSON"),
    "no_question": ("d.jsonl", GOOD.replace("?", " "), "d.jsonl:1: user_prompt is empty"),
    "no_text": ("d.jsonl", GOOD.replace('"?"', "5"), "d.jsonl:1: user_prompt must be a string, not int"),
    "empty": ("d.jsonl", "\n", "d.jsonl: contains no row"),
    "short_row": ("d.csv", "system_prompt,user_prompt,ground_truth\na,b\n", "d.csv:2: this row has 2 values"),
    "doubled": ("d.csv", "user_prompt,user_prompt\n", "d.csv:1: more than one column is called 'user_prompt'"),
    "open_quote": ("d.csv", 'system_prompt,user_prompt,ground_truth\n"a', "d.csv:2: this is not CSV"),
    "another_encoding": ("d.csv", b"\xff\xfe", "d.csv: is not UTF-8"),
    "no_parquet": ("d.parquet", "PAR", "d.parquet: this is not a Parquet file"),
    "another_form": ("d.xlsx", "", "d.xlsx: the name of a dataset must end in .jsonl, .csv, .parquet"),
}


@pytest.mark.parametrize(("name", "content", "said"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_told_by_file_and_line(here: Path, name: str, content: str | bytes, said: str) -> None:
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(AuthorError) as caught:
        read_rows(Path(name))
    assert str(caught.value).startswith(said)

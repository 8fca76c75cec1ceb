"""Formats of datasets: all give the same rows, and invalid files are reported with file and line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rollout_server.authoring.author_traceback import AuthorError

from tests.support.datasets import read_rows

GOLDEN = Path(__file__).parents[2] / "golden" / "datasets"
LONG = "long " * 60_000
ROWS: list[dict[str, str]] = [
    {"system_prompt": "Be brief.", "user_prompt": 'Say "hi",\nthen go.', "ground_truth": "hi", "kind": "ä"},
    {"system_prompt": "", "user_prompt": LONG, "ground_truth": "7", "kind": "b"},
]


def json_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\ufeff" + "\n\n".join(map(json.dumps, rows)) + "\n")
    return path


def json_list(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(rows, indent=2))
    return path


def json_data(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\ufeff" + json.dumps({"version": 1, "data": rows}))
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


def arrow_stream(path: Path, rows: list[dict[str, Any]]) -> Path:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


def arrow_file(path: Path, rows: list[dict[str, Any]]) -> Path:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


def saved(path: Path, rows: list[dict[str, Any]], split: str | None = None) -> Path:
    """A directory as `Dataset.save_to_disk` writes it, in two files."""
    path.mkdir(parents=True)
    names = [f"data-0000{n}-of-00002.arrow" for n in range(2)]
    for name, part in zip(names, (rows[:1], rows[1:]), strict=True):
        table = pa.Table.from_pylist(part, schema=pa.Table.from_pylist(rows).schema)
        with pa.ipc.new_stream(str(path / name), table.schema) as writer:
            writer.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "f", "_split": split}
    (path / "state.json").write_text(json.dumps(state))
    (path / "dataset_info.json").write_text("{}")
    return path


FORMS = {
    "d.jsonl": json_lines,
    "list.json": json_list,
    "data.json": json_data,
    "d.csv": comma_separated,
    "d.parquet": parquet,
    "stream.arrow": arrow_stream,
    "file.arrow": arrow_file,
    "saved": saved,
}
Write = Callable[[Path, list[dict[str, Any]]], Path]


@pytest.mark.parametrize(("name", "write"), FORMS.items(), ids=FORMS.keys())
def test_each_form_gives_the_same_rows(tmp_path: Path, name: str, write: Write) -> None:
    first, second = read_rows(write(tmp_path / name, ROWS))
    assert first.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": ROWS[0]["user_prompt"]},
    ]
    assert (first.number, first.metadata) == (1, {"ground_truth": "hi", "kind": "ä"})
    assert (second.number, second.prompt) == (2, LONG)
    assert second.messages == [{"role": "user", "content": LONG}]
    [again] = read_rows(write(tmp_path / "again" if write is saved else tmp_path / f"again.{name}", ROWS[:1]))
    of_json_lines = read_rows(json_lines(tmp_path / "same.jsonl", ROWS))
    assert again.fingerprint == first.fingerprint == of_json_lines[0].fingerprint
    assert first.fingerprint != second.fingerprint == of_json_lines[1].fingerprint


def test_directories_that_hugging_face_datasets_wrote() -> None:
    """The directories are recorded, see the README beside them."""
    [mixed] = read_rows(GOLDEN / "mixed")
    url = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    assert mixed.messages == [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, url]},
    ]
    assert mixed.metadata == {"ground_truth": "x", "info": {"a": 1, "b": [1, "two"]}}
    assert read_rows(GOLDEN / "mixed.parquet") == [mixed]
    red, blue = read_rows(GOLDEN / "images")
    [message] = red.messages
    image, text = message["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,iVBORw0KGgo")
    assert text == {"type": "text", "text": "Which colour?"}
    assert red.metadata == {"answer": "red", "ground_truth": "red"}
    assert red.messages != blue.messages
    assert red.prompt == "[image_url]\nWhich colour?"


def test_json_texts_are_parsed_by_versions_of_pyarrow_without_the_type(tmp_path: Path) -> None:
    """They only see a text column with the name of the type in its metadata."""
    stored = {b"ARROW:extension:name": b"arrow.json"}
    role, content = pa.field("role", pa.string()), pa.field("content", pa.string(), metadata=stored)
    schema = pa.schema([pa.field("prompt", pa.list_(pa.struct([role, content])))])
    rows = [{"prompt": [{"role": "user", "content": '[{"type":"text","text":"hi"}]'}]}, {"prompt": None}]
    path = tmp_path / "d.arrow"
    with pa.ipc.new_stream(str(path), schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    with pytest.raises(AuthorError, match=r"d\.arrow: row 2: prompt is empty"):
        read_rows(path)
    with pa.ipc.new_stream(str(path), schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows[:1], schema=schema))
    [row] = read_rows(path)
    assert row.messages == [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]


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
    assert [message["role"] for message in row.messages] == ["user"]


GOOD = '{"system_prompt": "", "user_prompt": "?", "ground_truth": 1}\n'
DEEP = "[" * 100_000 + "]" * 100_000
WRONG = {
    "broken": ("d.jsonl", GOOD + "{\n", "d.jsonl:2: this line is not JSON"),
    "no_object": ("d.jsonl", GOOD + "[]\n", "d.jsonl:2: this line is not a JSON object"),
    "not_finite": ("d.jsonl", GOOD.replace("1}", "NaN}"), "d.jsonl:1: this line is not JSON: NaN"),
    "huge_number": ("d.jsonl", GOOD.replace("1}", "1e999}"), None),
    "half_a_pair": (
        "d.jsonl",
        GOOD.replace("?", "\\ud800"),
        "d.jsonl:1: the column user_prompt cannot be sent as JSON",
    ),
    "half_a_pair_beside": (
        "d.jsonl",
        GOOD.replace("1}", '1, "note": "\\udfff"}'),
        "d.jsonl:1: the column note cannot be sent as JSON",
    ),
    "deep": ("d.jsonl", GOOD.replace("1}", DEEP + "}"), "d.jsonl:1: this line is not JSON: nested more than"),
    "deep_json": ("d.json", DEEP, "d.json: is not JSON: nested more than"),
    "no_question": ("d.jsonl", GOOD.replace("?", " "), "d.jsonl:1: user_prompt is empty"),
    "no_text": ("d.jsonl", GOOD.replace('"?"', "5"), "d.jsonl:1: user_prompt must be a text or a list of messages"),
    "empty": ("d.jsonl", "\n", "d.jsonl: contains no row"),
    "empty_json": ("d.json", "[]", "d.json: contains no row"),
    "lines_in_json": ("d.json", GOOD + GOOD, "d.json: is not JSON: Extra data"),
    "two_lists": ("d.json", '{"train": [], "test": []}', "d.json: must be a list of rows, or an object with one list"),
    "a_number": ("d.json", "5", "d.json: must be a list of rows"),
    "no_row": ("d.json", f"[{GOOD}, 5]", "d.json: row 2: must be an object, not int"),
    "a_row_of_json": ("d.json", f'[{GOOD}, {{"user_prompt": ""}}]', "d.json: row 2: user_prompt is empty"),
    "short_row": ("d.csv", "system_prompt,user_prompt,ground_truth\na,b\n", "d.csv:2: this row has 2 values"),
    "doubled": ("d.csv", "user_prompt,user_prompt\n", "d.csv:1: more than one column is called 'user_prompt'"),
    "open_quote": ("d.csv", 'system_prompt,user_prompt,ground_truth\n"a', "d.csv:2: this is not CSV"),
    "another_encoding": ("d.csv", b"\xff\xfe", "d.csv:1: this line is not UTF-8"),
    "no_parquet": ("d.parquet", "PAR", "d.parquet: this is not a Parquet file"),
    "no_arrow": ("d.arrow", "ARROW1\0\0", "d.arrow: this is not an Arrow file"),
    "another_form": ("d.xlsx", "", "d.xlsx: the name of a dataset must end in .jsonl, .json, .csv, .parquet, .arrow"),
}


@pytest.mark.parametrize(("name", "content", "said"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_told_by_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str | bytes, said: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    if said is None:  # JSON has no infinite numbers
        assert read_rows(Path(name))[0].metadata["ground_truth"] is None
        return
    with pytest.raises(AuthorError) as caught:
        read_rows(Path(name))
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize("name", ["d.jsonl", "d.csv", "d.parquet"])
def test_a_field_of_100_megabytes_is_refused(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": "hi", "answer": "x"}, {"prompt": "hi", "answer": "x" * 100_000_000}]
    path = FORMS[name](tmp_path / name, rows)
    where = {"d.jsonl": r"d\.jsonl:3: this line", "d.csv": r"d\.csv:3: this line"}.get(name, r"row 2: the row")
    with pytest.raises(AuthorError, match=rf"{where} has .* bytes.*shorten"):
        read_rows(path)


def test_a_large_field_names_its_column(tmp_path: Path) -> None:
    rows = [{"prompt": "hi", "context": "x" * 40_000_000, "answer": "x"}]
    with pytest.raises(
        AuthorError, match=r"d\.jsonl:1: .* bytes, 40,\d{3},\d{3} of them in the column context; at most"
    ):
        read_rows(json_lines(tmp_path / "d.jsonl", rows))


def test_an_arrow_file_with_invalid_offsets_is_refused(tmp_path: Path) -> None:
    """Reading such a text would read foreign memory."""
    path = arrow_stream(tmp_path / "d.arrow", [{"prompt": "x" * 77}])
    before, after = (b"\0\0\0\0" + length.to_bytes(4, "little") for length in (77, 79))
    head, found, tail = path.read_bytes().rpartition(before)
    assert found
    path.write_bytes(head + after + tail)
    with pytest.raises(AuthorError, match="this is not an Arrow file"):
        read_rows(path)


def test_columns_with_equal_names_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["prompt", "prompt"])
    pq.write_table(table, tmp_path / "d.parquet")
    with pytest.raises(AuthorError, match=r"d\.parquet: more than one column is called 'prompt'; rename one"):
        read_rows(tmp_path / "d.parquet")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(AuthorError, match=r"pipe\.jsonl: is neither a file nor a directory"):
        read_rows(tmp_path / "pipe.jsonl")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        read_rows(tmp_path / "loop.jsonl")
    with pytest.raises(FileNotFoundError):
        read_rows(tmp_path / "absent.jsonl")

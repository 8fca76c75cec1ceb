"""Splits of directories, and which rows are chosen in which order."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rollout_server.authoring.author_traceback import AuthorError
from rollout_server.authoring.dataset import DatasetOptions, convert, read_dataset, reader

from tests.authoring.dataset.test_formats import GOLDEN, json_lines, parquet, saved


def rows(*prompts: str) -> list[dict[str, str]]:
    return [{"prompt": prompt} for prompt in prompts]


def prompts(path: Path, split: str = "") -> list[str]:
    return [row.prompt for row in read_dataset(path, DatasetOptions(split=split)).rows]


def test_splits_of_hugging_face_datasets() -> None:
    conversations = GOLDEN / "conversations"
    assert prompts(conversations, "train") == [f"What is {n} plus 1?" for n in range(5)]
    assert prompts(conversations, "test") == [f"What is {n} plus 2?" for n in range(3)]
    with pytest.raises(
        AuthorError, match=r"conversations: has several splits, so --split NAME is needed; .* train, test"
    ):
        prompts(conversations)
    with pytest.raises(AuthorError, match="--split dev: there is no such split; the splits are train, test"):
        prompts(conversations, "dev")
    assert prompts(conversations / "test") == prompts(conversations, "test")


def test_a_saved_dataset_is_one_split(tmp_path: Path) -> None:
    path = saved(tmp_path / "d", rows("a", "b"), "train")
    assert prompts(path) == prompts(path, "train") == ["a", "b"]
    with pytest.raises(AuthorError, match="--split test: the directory is the split train"):
        prompts(path, "test")
    with pytest.raises(AuthorError, match="--split test: the directory is one dataset without splits"):
        prompts(saved(tmp_path / "e", rows("a", "b")), "test")


def test_splits_are_files_or_their_shards(tmp_path: Path) -> None:
    json_lines(tmp_path / "train.jsonl", rows("a", "b"))
    parquet(tmp_path / "test-00001-of-00002.parquet", rows("d"))
    parquet(tmp_path / "test-00000-of-00002.parquet", rows("c"))
    (tmp_path / "README.md").write_text("no dataset")
    (tmp_path / ".hidden.jsonl").write_text("no dataset")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    (tmp_path / "directory.jsonl").symlink_to(tmp_path)
    assert prompts(tmp_path, "train") == ["a", "b"]
    assert prompts(tmp_path, "test") == ["c", "d"]
    with pytest.raises(AuthorError, match="the splits are test, train"):
        prompts(tmp_path)
    (tmp_path / "train.jsonl").unlink()
    assert prompts(tmp_path) == ["c", "d"]
    (tmp_path / "test-00000-of-00002.parquet").unlink()
    with pytest.raises(AuthorError, match=r"the split test must be one file or all of its shards; it has 1 files"):
        prompts(tmp_path)


def test_a_wrong_row_of_a_shard_names_its_file(tmp_path: Path) -> None:
    json_lines(tmp_path / "test-00000-of-00002.jsonl", rows("a", "b"))
    json_lines(tmp_path / "test-00001-of-00002.jsonl", rows("c", ""))
    with pytest.raises(AuthorError, match=r"test-00001-of-00002\.jsonl:3: prompt is empty"):
        prompts(tmp_path)


Spoil = Callable[[Path], object]


def state(**fields: object) -> Spoil:
    return lambda path: (path / "state.json").write_text(json.dumps(fields))


WRONG: dict[str, tuple[Spoil, str]] = {
    "no_state": (lambda path: (path / "state.json").write_text("{"), "is not a state of Hugging Face"),
    "deep": (lambda path: (path / "state.json").write_text("[" * 100_000), "is not a state of Hugging Face"),
    "no_files": (state(), "has no list of data files"),
    "outside": (state(_data_files=[{"filename": "../d.arrow"}]), r"'\.\./d\.arrow' is not the name of a file"),
    "no_name": (state(_data_files=[{}]), "None is not the name of a file"),
    "absent": (state(_data_files=[{"filename": "x.arrow"}]), r"names x\.arrow, which is not an Arrow file beside it"),
    "many": (state(_data_files=[{"filename": "x.arrow"}] * 10_001), "has no list of data files"),
    "no_splits": (lambda path: (path / "dataset_dict.json").write_text("{}"), "has no list of splits"),
    "outer_split": (
        lambda path: (path / "dataset_dict.json").write_text('{"splits": [".."]}'),
        r"'\.\.' is not the name of a file or directory",
    ),
    "absent_split": (lambda path: (path / "dataset_dict.json").write_text('{"splits": ["x"]}'), "No such file"),
}


@pytest.mark.parametrize(("spoil", "said"), WRONG.values(), ids=WRONG.keys())
def test_spoiled_directories_are_refused(tmp_path: Path, spoil: Spoil, said: str) -> None:
    path = saved(tmp_path / "d", rows("a", "b"))
    spoil(path)
    (tmp_path / "d.arrow").write_bytes((path / "data-00000-of-00002.arrow").read_bytes())
    with pytest.raises((AuthorError, OSError), match=said):
        prompts(path)


def test_a_directory_without_its_state_is_one_of_shards(tmp_path: Path) -> None:
    path = saved(tmp_path / "d", rows("a", "b"))
    (path / "state.json").unlink()
    assert prompts(path) == prompts(path, "data") == ["a", "b"]


def test_what_is_no_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AuthorError, match=r"contains no dataset: no dataset_dict\.json or state\.json of"):
        prompts(tmp_path)
    with pytest.raises(AuthorError, match="--split test: one file has no splits"):
        prompts(json_lines(tmp_path / "d.jsonl", rows("a")), "test")


ALPHABET = "abcdefghij"
RECORDED = "dgchbjiaef"


def chosen(path: Path, shuffle: int | None = None, offset: int = 0, limit: int | None = None) -> str:
    options = DatasetOptions(shuffle=shuffle, offset=offset, limit=limit)
    return "".join(row.prompt for row in read_dataset(path, options).rows)


def test_a_seed_determines_the_order(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "d.jsonl", rows(*ALPHABET))
    # Recorded: the order must never change, on no platform and in no version.
    assert chosen(path, 7) == RECORDED
    assert chosen(path, 8) != RECORDED
    assert sorted(chosen(path, 8)) == list(ALPHABET)
    for offset in range(10):
        for limit in range(1, 12):
            assert chosen(path, 7, offset, limit) == RECORDED[offset : offset + limit]
            assert chosen(path, None, offset, limit) == ALPHABET[offset : offset + limit]
    found = read_dataset(path, DatasetOptions(shuffle=7, limit=3))
    assert [ALPHABET[row.number - 1] for row in found.rows] == [row.prompt for row in found.rows]
    assert found.description().endswith("3 rows; prompt from 'prompt', no ground truth, shuffled with seed 7")


def test_the_order_is_the_same_in_another_process(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "d.jsonl", rows(*ALPHABET))
    program = (
        "import sys; from pathlib import Path; from rollout_server.authoring.dataset import *;"
        "print(''.join(row.prompt for row in read_dataset(Path(sys.argv[1]), DatasetOptions(shuffle=7)).rows))"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program, str(path)],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == RECORDED


def test_rows_after_the_limit_are_not_read(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "d.jsonl", rows(*ALPHABET))
    path.write_text(path.read_text() + "broken\n")
    assert chosen(path, None, 2, 8) == "cdefghij"
    with pytest.raises(AuthorError, match=r"d\.jsonl:20: this line is not JSON"):
        chosen(path, None, 0, 11)
    with pytest.raises(AuthorError, match=r"d\.jsonl:20: this line is not JSON"):
        chosen(path, 7, 0, 1)


def test_an_offset_that_skips_all_rows_is_refused(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "d.jsonl", rows("a", "b"))
    for shuffle in (None, 7):
        with pytest.raises(AuthorError, match=r"d\.jsonl: contains no row after the first 2, which --offset skips"):
            chosen(path, shuffle, 2)


def test_rows_and_bytes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = json_lines(tmp_path / "d.jsonl", rows(*ALPHABET))
    monkeypatch.setattr(convert, "MAX_ROWS", 9)
    with pytest.raises(AuthorError, match=r"d\.jsonl:19: the dataset has more than 9 rows; split it, or use --limit"):
        chosen(path)
    assert chosen(path, None, 0, 9) == "abcdefghi"
    monkeypatch.undo()
    monkeypatch.setattr(reader, "MAX_BYTES", 200)
    for shuffle in (None, 7):
        with pytest.raises(AuthorError, match=r"d\.jsonl: its rows have more than 200 bytes; use --limit"):
            chosen(path, shuffle)
    assert chosen(path, None, 6, 4) == "ghij"
    assert chosen(path, 7, 0, 3) == RECORDED[:3]

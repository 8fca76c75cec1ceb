"""Samples in JSON lines and Parquet files."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_client import samples
from rollout_client.export import read_jsonl, read_parquet, to_dict, write_jsonl, write_parquet

from tests.support.random_rollouts import outcome_of, rollouts, span

HAS_ARROW = importlib.util.find_spec("pyarrow") is not None
needs_arrow = pytest.mark.skipif(not HAS_ARROW, reason="needs pyarrow: the extra `parquet`")
(SAMPLE,) = samples(outcome_of(span("prompt", 2), span("model", 2)))
LINE = json.dumps(to_dict(SAMPLE))


@settings(max_examples=25, deadline=None)
@given(rollouts(split=True))
def test_lines_are_read_as_they_were_written(rollout: pb.Rollout) -> None:
    found = samples(rollout)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.jsonl"
        assert write_jsonl(found, path) == len(found)
        assert write_jsonl(iter(found), str(path), append=True) == len(found)
        assert list(read_jsonl(path)) == found * 2
        assert write_jsonl([], path) == 0
        assert list(read_jsonl(path)) == []


def test_a_line_is_a_line_whatever_stands_in_it(tmp_path: Path) -> None:
    odd = dataclasses.replace(SAMPLE, reason="a\u2028b\nc\r\x85", group_id="ü€😀")
    write_jsonl([odd, SAMPLE], tmp_path / "s")
    assert (tmp_path / "s").read_bytes().count(b"\n") == 2
    assert list(read_jsonl(tmp_path / "s")) == [odd, SAMPLE]


BAD_LINES = {
    "no_json": (b"{", "Expecting"),
    "no_object": (b"[]", "a sample is not an object"),
    "no_utf8": (b'"\xff"', "utf-8"),
    "deep": (b"[" * 100_000, "nested too deeply"),
    "infinite": (LINE.replace("-0.5", "1e999").encode(), "not a finite number"),
    "contradiction": (LINE.replace('"response_mask": [1, 1]', '"response_mask": [1, 0]').encode(), "segment '0'"),
}


@pytest.mark.parametrize(("line", "named"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_line_is_told_by_its_number(tmp_path: Path, line: bytes, named: str) -> None:
    path = tmp_path / "s"
    path.write_bytes(LINE.encode() + b"\n\n" + line + b"\n")
    reader = read_jsonl(path)
    assert next(reader) == SAMPLE
    with pytest.raises(ValueError, match=f"line 3: .*{named}"):
        next(reader)


def test_a_number_without_a_word_in_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="segment '0'"):
        write_jsonl([dataclasses.replace(SAMPLE, reward=float("nan"))], tmp_path / "s")


@needs_arrow
@settings(max_examples=25, deadline=None)
@given(rollouts(split=True))
def test_rows_are_read_as_they_were_written(rollout: pb.Rollout) -> None:
    found = samples(rollout)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step=3" / "samples.parquet"
        path.parent.mkdir()
        assert write_parquet(iter(found), path) == len(found)
        assert read_parquet(str(path)) == found


@needs_arrow
def test_a_file_of_other_rows_is_refused(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"segment_id": ["0"]}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="no column 'prompt_ids'"):
        read_parquet(tmp_path / "other.parquet")
    (tmp_path / "text").write_text("no Parquet")
    with pytest.raises(ValueError, match=r"."):
        read_parquet(tmp_path / "text")


@pytest.mark.skipif(HAS_ARROW, reason="pyarrow is installed")
def test_without_pyarrow_the_extra_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"rollout-server\[parquet\]"):
        write_parquet([SAMPLE], tmp_path / "s")
    with pytest.raises(ImportError, match=r"rollout-server\[parquet\]"):
        read_parquet(tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_exporting_needs_nothing_but_the_client() -> None:
    program = (
        "import sys, rollout_client.export; "
        "print(*sorted({'pyarrow', 'numpy', 'torch', 'transformers', 'pydantic', 'rollout_server'} & set(sys.modules)))"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.split() == []

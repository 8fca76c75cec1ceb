"""Files that are broken, huge or hostile: each is reported, none ends in a traceback or hides the rows behind it."""

from __future__ import annotations

import gzip
import io
import json
import os
import threading
import tracemalloc
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_client.export import from_dict, write_parquet
from rollout_server.verification import earlier_rows, groups, reader
from rollout_server.verification.findings import FindingKind, Location, SampleFinding
from rollout_server.verification.shapes import SampleShape, find_rows, shape_of
from rollout_server.verification.verify import SampleVerifier, report_json

from tests.client.test_export_files import needs_arrow
from tests.verification.rows import FORMATS, codes, generic, ours, row, rows, verified

GOOD = json.dumps(generic(row(Random(1), 2, uid="u1"))).encode()
OTHER = json.dumps(generic(row(Random(2), 2, uid="u2"))).encode()

BROKEN = {
    "cut": (GOOD[:-5], "not JSON"),
    "deep": (b"[" * 100_000, "nested too deeply"),
    "deep_object": (b'{"prompt_ids":' * 100_000, "nested too deeply"),
    "binary": (bytes(range(1, 10)) + bytes(range(11, 256)), "not "),
    "latin": ('{"response_ids": [], "ü": 1}'.encode("latin-1"), "not UTF-8 at byte"),
    "huge_number": (b'{"response_ids": [1' + b"0" * 5000 + b"]}", "not JSON"),
    "words": (b"hello", "not JSON"),
}


@pytest.mark.parametrize(("line", "text"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_line_hides_no_other(tmp_path: Path, line: bytes, text: str) -> None:
    for content, number in ((GOOD + b"\n\n" + line + b"\n" + OTHER, 3), (line + b"\n" + GOOD + b"\n" + OTHER, 1)):
        report = verified(tmp_path / "s", content)
        (found,) = report.log.first()
        assert (found.kind, found.location) == (FindingKind.UNREADABLE, Location(str(tmp_path / "s"), number))
        assert text in found.text
        assert report.rows == {SampleShape.GENERIC: 2}


WHOLE = {
    "empty": (b"", {"nothing_trains": 1}),
    "blank": (b"\n \n", {"nothing_trains": 1}),
    "null": (b"null", {"unknown_shape": 1}),
    "number": (b"17", {"unknown_shape": 1}),
    "no_rows": (b"[]", {"nothing_trains": 1}),
    "lists": (b"[[[]], 1]", {"unknown_shape": 2}),
    "other": (b'{"messages": [], "tools": []}', {"unknown_shape": 1}),
    "gzip": (gzip.compress(GOOD), {"unreadable": 1}),
    "utf_16": (GOOD.decode().encode("utf-16"), {"unreadable": 1}),
    "no_parquet": (b"PAR1" + b"x" * 100, {"unreadable": 1}),
    "no_trace": (b'{"schema_version": 1, "turns": [1, {}]}', {"missing_field": 3}),
    "empty_columns": (b'{"completion_ids": [[], null, {}], "prompt_ids": 5, "env_mask": []}', None),
    "strings": (b'{"response_ids": "abc", "prompt_ids": {"a": 1}, "response_mask": 1}', {"missing_field": 2}),
    "deep_values": (
        b'{"response_ids": ['
        + b"[" * 900
        + b"]" * 900
        + b'], "prompt_ids": [1], "reward": '
        + b"[" * 900
        + b"]" * 900
        + b"}",
        {"token_ids": 1, "missing_field": 1, "reward": 1},
    ),
    "odd_ids": (
        b'{"response_ids": [5], "prompt_ids": [], "response_mask": [1], "uid": {}, "group_id": [], "reward": {}}',
        {"reward": 1},
    ),
}


@pytest.mark.parametrize(("content", "expected"), WHOLE.values(), ids=WHOLE.keys())
def test_a_file_without_samples(tmp_path: Path, content: bytes, expected: dict[str, int] | None) -> None:
    if content.startswith(b"PAR1"):
        pytest.importorskip("pyarrow", reason="needs pyarrow: the extra `parquet`")
    report = verified(tmp_path / "s", content)
    assert not report.ok
    assert expected is None or codes(report) == expected


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    assert codes(verified(tmp_path / "s", b"\xef\xbb\xbf" + GOOD + b"\n" + OTHER)) == {}


def test_a_document_over_several_lines(tmp_path: Path) -> None:
    made = [json.loads(GOOD), json.loads(OTHER)]
    report = verified(tmp_path / "s", json.dumps(made, indent=2))
    assert (codes(report), report.rows.total()) == ({}, 2)
    made[1]["loss_mask"][0] = 5
    (found,) = verified(tmp_path / "s", json.dumps(made, indent=2)).log.first()
    assert (found.field_path, found.index) == ("[1].loss_mask", 0)


def test_a_line_above_the_bound_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_LONGEST", 2 * max(len(GOOD), len(OTHER)))
    huge = b'{"response_ids": [' + b"1, " * 10 * len(GOOD) + b"1]}"
    for content in (GOOD + b"\n" + huge + b"\n" + OTHER, huge + b"\n" + GOOD + b"\n" + OTHER):
        report = verified(tmp_path / "s", content)
        (found,) = report.log.first()
        assert found.location is not None
        assert "longer than" in found.text
        assert content.split(b"\n")[found.location.number - 1] == huge
        assert report.rows.total() == 2


def test_a_pipe_is_read(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    content = json.dumps([json.loads(GOOD)], indent=1).encode()
    writer = threading.Thread(target=path.write_bytes, args=(content,))
    writer.start()
    report = SampleVerifier(10).verify([path])
    writer.join()
    assert (codes(report), report.rows.total()) == ({}, 1)


KEYS = (
    *("prompt_ids", "response_ids", "completion_ids", "prompt_token_ids", "completion_token_ids"),
    *("response_mask", "loss_mask", "env_mask", "logprobs", "response_logprobs", "per_token_logps"),
    *("turns", "schema_version", "node_id", "uid", "group_id", "rollout_uid", "num_turns", "trainable"),
    *("reward", "rewards", "scores", "extra_fields", "rollout_sample", "spans", "segment_id"),
)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(KEYS),
            inner,
            max_size=8,
        )
    ),
    max_leaves=25,
)


@given(st.lists(JSON_VALUES, min_size=1, max_size=4), st.none() | st.sampled_from(SampleShape))
def test_any_json_gets_a_report(
    tmp_path_factory: pytest.TempPathFactory, values: list[object], shape: SampleShape | None
) -> None:
    path = tmp_path_factory.mktemp("any") / "s"
    report = verified(path, "".join(json.dumps(value) + "\n" for value in values), shape=shape)
    json.dumps(report_json(report), allow_nan=False)


@given(st.binary(max_size=300))
def test_any_bytes_get_a_report(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    assert not verified(tmp_path_factory.mktemp("any") / "s", content).ok


def test_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without end: the windows of earlier rows and of groups are bounded."""
    monkeypatch.setattr(earlier_rows, "_TOKENS", 2_000)
    monkeypatch.setattr(earlier_rows, "_DIGESTS", 20)
    monkeypatch.setattr(groups, "_GROUPS", 10)

    def peak(count: int) -> int:
        path = tmp_path / f"{count}"
        random = Random(3)
        with path.open("w") as file:
            for number in range(count):
                made = row(
                    random, 2, uid=f"u{number}" if number % 2 else "", group=f"g{number // 4}", reward=number % 3
                )
                file.write(json.dumps(generic(made)) + "\n")
        tracemalloc.start()
        try:
            assert SampleVerifier(20).verify([path]).rows.total() == count
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(1600) < 1.5 * peak(200)


def test_an_overlap_within_the_window_is_found_whatever_lies_between(tmp_path: Path) -> None:
    random = Random(3)
    between = [row(random, 2, uid=f"u{n}") for n in range(50)]
    made = [between[0], *between, row(random, 1, uid="u")]
    report = verified(tmp_path / "s", FORMATS[SampleShape.GENERIC]([*made, between[-1]]))
    assert codes(report) == {"trains_twice": 2}


@needs_arrow
def test_a_parquet_file_that_breaks_off(tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    write_parquet([from_dict(ours(each)) for each in rows(Random(1))], path)
    content = path.read_bytes()
    assert codes(verified(path, content)) == {}
    report = verified(path, content[: len(content) // 2])
    assert codes(report) == {"unreadable": 1}


@needs_arrow
def test_a_row_of_parquet_is_named_by_its_number(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    made = rows(Random(1), groups=8, each=4)
    made[20].response[3] = -1
    made[21].logprobs[0] = float("nan")
    parquet.write_table(pyarrow.Table.from_pylist([generic(each) for each in made]), tmp_path / "s")
    report = SampleVerifier(10).verify([tmp_path / "s"])
    found = [(each.location and each.location.number, each.field_path, each.index) for each in report.log.first()]
    assert found == [(21, "completion_ids", 3), (22, "rollout_log_probs", 0)]


def test_shapes_are_recognised_by_their_keys() -> None:
    assert shape_of({"response_ids": [], "segment_id": "0"}) is SampleShape.ROLLOUT
    assert shape_of({"response_ids": [], "num_turns": 2}) is SampleShape.VERL
    assert shape_of({"completion_ids": [[1]], "prompt_ids": [[1]]}) is SampleShape.TRL
    assert shape_of({"completion_ids": [1], "prompt_ids": [1]}) is SampleShape.GENERIC
    assert shape_of({"schema_version": 1, "turns": []}) is SampleShape.OPENENV
    assert shape_of({"messages": []}) is None
    (found,) = find_rows({"messages": []}, Location("f", 1))
    assert isinstance(found, SampleFinding)
    assert "'messages'" in found.text


def test_json_output_is_bounded(tmp_path: Path) -> None:
    content = io.BytesIO(b"x\n" * 1000).getvalue()
    path = tmp_path / "s"
    path.write_bytes(content)
    document = report_json(SampleVerifier(5).verify([path]))
    assert (document["fatal"], len(document["findings"]), document["kinds"]) == (1000, 5, {"unreadable": 1000})

"""Files of rollouts: what the REST API returned, exports, results of evaluations; and files that are none."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_client import samples
from rollout_client.export import to_dict
from rollout_gateway.rest.proto_json import event_json, response_json
from rollout_server.archive import files
from rollout_server.archive.archive import Unreadable
from rollout_server.archive.files import saved_in
from rollout_server.archive.saved import open_archive
from rollout_server.authoring.rollout_result import Times, Tokens
from rollout_server.evaluation.row_result import RowResult
from rollout_server.inspection.rest_json import event_of, rollout_of

from tests.archive.conftest import OpenSaved, Recorded

HOSTILE = "</script><img src=x onerror=alert(1)>\u2028\u202e\ud800\x00"


def write(path: Path, *values: Any) -> Path:
    """Write values as JSON, one to a line."""
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values))
    return path


async def test_json_of_the_api_is_shown_as_it_is(recorded: Recorded, open_saved: OpenSaved, tmp_path: Path) -> None:
    wanted = recorded.rollouts[0]
    client = await open_saved(write(tmp_path / "one.json", wanted))
    found = (await client.get(f"/v1/rollouts/{wanted['uid']}", params={"view": "full"})).json()
    assert found == {**wanted, "last_sequence": 0}  # its events are not in the file
    reply = await client.get(f"/v1/rollouts/{wanted['uid']}/events", params={"detail": "full"})
    assert reply.status_code == 204
    segment = wanted["outcome"]["segments"][0]["id"]
    texts = (await client.get(f"/v1/rollouts/{wanted['uid']}/segments/{segment}/tokens")).json()["texts"]
    assert texts[0] == {"start": 0, "stop": 1, "text": "<|im_start|>", "special": True}


def test_json_is_read_back_without_loss(recorded: Recorded) -> None:
    for rollout, events in zip(recorded.rollouts, recorded.events, strict=True):
        assert json.loads(response_json(rollout_of(rollout), pb.ROLLOUT_VIEW_FULL)) == rollout
        for event in events:
            assert json.loads(msgspec.json.encode(event_json(event_of(event), 3))) == event


async def test_lines_of_rollouts_and_directories(recorded: Recorded, open_saved: OpenSaved, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    write(folder / "all.jsonl", *recorded.rollouts[:3])
    kept = {"rollout": recorded.rollouts[3], "events": recorded.events[3], "texts": {}}
    (folder / "more.jsonl.gz").write_bytes(gzip.compress(json.dumps(kept).encode() + b"\n"))
    (folder / "notes.txt").write_text("no rollout")
    client = await open_saved(folder)
    listed = (await client.get("/v1/rollouts")).json()["rollouts"]
    assert {each["uid"] for each in listed} == {each["uid"] for each in recorded.rollouts}
    uid = recorded.rollouts[3]["uid"]
    reply = await client.get(f"/v1/rollouts/{uid}", params={"view": "full"})
    assert reply.json() == recorded.rollouts[3]


def test_different_rollouts_have_different_uids(tmp_path: Path) -> None:
    """Those that a file has stay as they are. Rows of several files do not form a group."""
    found: list[Path] = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        found += [
            write(tmp_path / folder / "eval.jsonl", *(asdict(result(row, end="refused")) for row in (1, 2))),
            write(
                tmp_path / folder / "odd.jsonl", *({"uid": uid, "state": "finished"} for uid in ("x/y", "x y", "same"))
            ),
        ]
    other = write(tmp_path / "other.jsonl", asdict(result(1, end="refused")), asdict(result(2, end="refused")))
    with open_archive([*found, other], print) as archive:
        assert archive.uids == [
            *("eval-row-1-1", "eval-row-2-1", "x-y", "x-y-2", "same", "eval-row-1-1-2", "eval-row-2-1-2"),
            *("other-row-1-1", "other-row-2-1"),
        ]
        groups = {archive.read(uid).rollout.spec.group_id for uid in archive.uids if "row-1" in uid}
        assert groups == {"eval-row-1", "other-row-1"}
        assert archive.read("x-y-2").rollout.uid == "x-y-2"


def test_a_file_that_is_left_out_is_reported(recorded: Recorded, tmp_path: Path) -> None:
    write(tmp_path / "one.json", recorded.rollouts[0])
    (tmp_path / "notes.txt").write_text("no rollout")
    reports: list[str] = []
    with open_archive([tmp_path], reports.append) as archive:
        assert archive.uids == [recorded.rollouts[0]["uid"]]
    assert [text for text in reports if text.startswith(f"left out: {tmp_path / 'notes.txt'}")]


@pytest.mark.parametrize("form", ["client", "page"])
def test_samples_become_segments(recorded: Recorded, tmp_path: Path, form: str) -> None:
    wanted = rollout_of(recorded.rollouts[0])
    lines = [*map(to_dict, samples(wanted))] if form == "client" else recorded.rollouts[0]["outcome"]["samples"]
    [saved] = saved_in(write(tmp_path / "samples.jsonl", *lines))
    found = saved.read().rollout
    assert found.uid == (wanted.uid if form == "client" else "samples-samples")
    expected = {each.id: [*each.spans] for each in wanted.outcome.segments}
    for segment in found.outcome.segments:
        ids = [id for span in segment.spans for id in span.token_ids]
        masks = [span.mask_reason for span in segment.spans for _ in span.token_ids]
        assert ids == [id for span in expected[segment.id] for id in span.token_ids][: len(ids)]
        assert masks == [span.mask_reason for span in expected[segment.id] for _ in span.token_ids][: len(ids)]


def result(row: int, **changes: Any) -> RowResult:
    fields: dict[str, Any] = {"tokens": Tokens(10, 5, 12), "ms": Times(20.0), "turns": 1}
    return RowResult(f"row-{row}-1", row=row, **({"end": "stop", "reason": "stop"} | fields | changes))


async def test_results_of_an_evaluation(open_saved: OpenSaved, tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "What is 6 * 7?"}]
    answered = [*prompt, {"role": "assistant", "content": "42"}]
    results = [
        result(1, uid="srv-1", reward=1.0, scores={"style": 0.5}, prompt=prompt, messages=answered, ground_truth=42),
        result(2, end="refused", reason="invalid", message="no such tool", prompt=prompt),
        result(
            3, end="failure", reason="engine_server", failure_class="engine", message="503", metadata={"level": "hard"}
        ),
    ]
    head = {"evaluation": {"agent": "calculator"}, "code": ""}
    path = write(tmp_path / "results.jsonl", head, *map(asdict, results))
    path.write_bytes(path.read_bytes() + b'{"rollout_id": "row-4')  # the trace of an interruption
    client = await open_saved(path)
    listed = (await client.get("/v1/rollouts", params={"view": "messages"})).json()["rollouts"]
    third, second, first = listed
    assert (first["uid"], second["uid"]) == ("srv-1", "results-row-2-1")
    assert (first["spec"]["agent"], first["spec"]["messages"], first["outcome"]["messages"]) == (
        "calculator",
        prompt,
        answered,
    )
    assert first["spec"]["labels"]["ground truth"] == "42"
    assert (first["outcome"]["reward"], first["outcome"]["scores"]) == (1.0, {"style": 0.5})
    assert (second["outcome"]["end"], second["outcome"]["message"]) == ("failure", "refused: no such tool")
    assert (third["outcome"]["failure_class"], third["spec"]["labels"]["level"]) == ("engine", "hard")


def test_texts_that_no_protobuf_can_hold(tmp_path: Path) -> None:
    hostile = [{"role": "user", "content": HOSTILE}]
    rollout = {"uid": "srv-1", "state": "finished", "spec": {"messages": hostile}, "outcome": None}
    [saved] = saved_in(write(tmp_path / "one.json", rollout))
    assert json.loads(saved.read().rollout.spec.messages[0].json) == hostile[0]
    with pytest.raises(Unreadable, match="surrogates"):
        saved_in(write(tmp_path / "two.json", {**rollout, "caller": HOSTILE}))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is empty"),
        (b"text", "holds no rollout"),
        (b'{"a": 1}', "holds no rollout"),
        (b'{"a": 1}\n{"b": 2}\n', "holds no rollout"),
        (b'{"response_ids": [1]}\n', "is missing"),
        (b'{"row": 1, "repeat": 1}\n', "missing required field"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"rollouts":' * 20_000, "nested too deeply"),
        (b"\x1f\x8b\x08broken", "cannot be read"),
        (gzip.compress(b"x" * 10_000, mtime=0)[:-20], "cannot be read"),
        (b'{"state": "finished", "uid": "a", "outcome": {"end": "vanished"}}', "cannot end as"),
    ],
)
def test_other_files_are_refused_with_a_reason(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(Unreadable, match=text):
        saved_in(path)


@pytest.mark.parametrize(
    "line",
    [
        '{"rollout": {"uid": "b", "state": "finished"}, "events": 5}',
        '{"rollout": {"uid": "b", "state": "finished", "spec": {"messages": 5}}, "events": []}',
        '{"uid": "b", "state": "finished", "outcome": null, "spec": {"messages": [{"role": "user", "content": NaN}]}}',
        '{"uid": "b", "state": "finished", "outcome": null, "spec": {"messages": [{"role": "user", "content": 1e999}]}}',
        '{"response_ids": 5, "uid": "b"}',
    ],
)
async def test_a_line_of_another_shape_hides_no_others(tmp_path: Path, open_saved: OpenSaved, line: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(f'{{"uid": "a", "state": "finished", "outcome": null}}\n{line}\n')
    client = await open_saved(path)
    broken, sound = (await client.get("/v1/rollouts")).json()["rollouts"]
    assert (sound["uid"], sound["outcome"], broken["uid"]) == ("a", None, "b")
    assert "cannot be read" in broken["outcome"]["message"]
    path.write_text(f"{line}\n")
    with pytest.raises(Unreadable):
        saved_in(path)


def test_files_that_are_too_large_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(files, "MOST_UNPACKED", 1 << 20)
    line = json.dumps({"uid": "a", "state": "finished", "caller": "x" * (1 << 20)})
    for content, text in (
        (line.encode(), "too large for one rollout"),
        (f"{{}}\n{line}\n".encode(), "too large for one rollout"),
        (b"\n" * (3 << 20) + b"x", "too large for one rollout"),
        (gzip.compress(b" " * (3 << 20)), "when it is unpacked"),
    ):
        path = tmp_path / "large"
        path.write_bytes(content)
        with pytest.raises(Unreadable, match=text):
            saved_in(path)


def test_a_directory_without_rollouts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="it is not the directory of a journal"), open_archive([tmp_path], print):
        pass
    with pytest.raises(Unreadable, match="does not exist"), open_archive([tmp_path / "gone"], print):
        pass

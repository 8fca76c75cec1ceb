"""The results file and the samples file: what an interruption leaves, and what changed since."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rollout_client import TrainingSample
from rollout_client.export import read_jsonl, read_parquet, write_jsonl
from rollout_server.authoring.author_traceback import AuthorError
from rollout_server.authoring.rollout_result import Result
from rollout_server.evaluation.results_file import ResultsFile
from rollout_server.evaluation.row_result import (
    LONGEST_TEXT,
    MOST_CHARACTERS,
    Job,
    RowResult,
    bounded,
    jobs_of,
    row_result,
)
from rollout_server.evaluation.samples_file import SamplesFile

from tests.evaluation.dataset_rows import rows_of

EVALUATION = {"agent": "a", "endpoint": {"name": "m", "sampling": {"temperature": 0.5}}}


def done(job: Job, **changes: Any) -> RowResult:
    return replace(
        row_result(Result(job.rollout_id, "stop", "stop", reward=1.0, uid=f"u-{job.rollout_id}"), job), **changes
    )


def written(path: Path, results: list[RowResult], code: str = "1") -> None:
    file = ResultsFile(path, EVALUATION, code)
    with file.open(anew=True):
        for result in results:
            file.write(result)


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    jobs = jobs_of(rows_of(tmp_path, {"ground_truth": 2**70, "text": "Zürich", "info": {"level": [1, None]}}, {}), 2)
    written(tmp_path / "r", [done(job) for job in jobs])
    file = ResultsFile(tmp_path / "r", EVALUATION, "1")
    file.resume(jobs)
    assert [(key, result.prompt) for key, result in file.results.items()] == [
        ((job.row.number, job.repeat), job.row.messages) for job in jobs
    ]
    first = file.results[1, 1]
    assert (first.ground_truth, first.metadata) == (2**70, {"text": "Zürich", "info": {"level": [1, None]}})
    assert (file.changed_rows, file.code_changed) == ([], False)


def test_rows_that_changed_are_named_and_the_last_line_decides(tmp_path: Path) -> None:
    one, two, three, nine = jobs_of(rows_of(tmp_path, {}, {}, {}, {}), 1)
    failed = done(two, end="failure", reason="network")
    written(tmp_path / "r", [failed, done(one, fingerprint="other"), done(three), done(two), done(nine)])
    file = ResultsFile(tmp_path / "r", EVALUATION, "2")
    file.resume([one, two, three])
    assert (sorted(file.results), file.changed_rows, file.code_changed) == ([(2, 1), (3, 1)], [1], True)
    with file.open(anew=False):
        file.write(done(one))
        file.write(done(three, end="cancellation"))
    again = ResultsFile(tmp_path / "r", EVALUATION, "1")
    again.resume([one, two, three])
    assert (sorted(again.results), again.changed_rows, again.code_changed) == ([(1, 1), (2, 1)], [], False)


@pytest.mark.parametrize(
    ("evaluation", "named"),
    [
        ({**EVALUATION, "agent": "b"}, 'agent was "a" and is "b" in this run'),
        (
            {"agent": "a", "endpoint": {"name": "m", "sampling": {}}},
            "endpoint.sampling.temperature was 0.5 and is not set",
        ),
        ({**EVALUATION, "samples": "s.jsonl"}, 'samples was not set and is "s.jsonl" in this run'),
    ],
)
def test_another_evaluation_is_named(tmp_path: Path, evaluation: dict[str, Any], named: str) -> None:
    written(tmp_path / "r", [])
    with pytest.raises(AuthorError) as raised:
        ResultsFile(tmp_path / "r", evaluation).resume([])
    assert named in str(raised.value)


def test_one_process_writes_a_results_file(tmp_path: Path) -> None:
    [job] = jobs_of(rows_of(tmp_path, {}), 1)
    written(tmp_path / "r", [done(job)])
    first, second = ResultsFile(tmp_path / "r", EVALUATION), ResultsFile(tmp_path / "r", EVALUATION)
    with first.open(anew=False):
        for anew in (True, False):
            with pytest.raises(AuthorError, match="another process is writing these results"), second.open(anew=anew):
                raise AssertionError("not reached")
        first.write(done(job))
    with second.open(anew=False):
        second.resume([job])
    assert list(second.results) == [(1, 1)]


def test_a_full_disk_names_the_file_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "r").symlink_to("/dev/full")
    text = "r: cannot be written: No space left on device; .* continue with --resume"
    with pytest.raises(AuthorError, match=text), ResultsFile(tmp_path / "r", EVALUATION).open(anew=False):
        raise AssertionError("not reached")
    (tmp_path / "s.jsonl").symlink_to("/dev/full")
    file = SamplesFile(tmp_path / "s.jsonl")
    with pytest.raises(AuthorError, match=text.replace("r:", "s.jsonl:")), file.open(anew=False):
        file.write([sample("a")])


def test_long_values_are_cut_and_say_so() -> None:
    long = "x" * (LONGEST_TEXT + 5)
    assert bounded({"a": long, "b": [1, 2.5, True, None]}) == {
        "a": f"{'x' * LONGEST_TEXT}… (5 more characters)",
        "b": [1, 2.5, True, None],
    }
    for value in ([long] * 100, {str(number): long for number in range(100)}, [[1] * 1000] * 1000, long * 100):
        assert len(json.dumps(bounded(value))) < 2 * MOST_CHARACTERS
    assert bounded([long] * 100)[-1] == "… 84 more"


def sample(uid: str, segment: str = "0") -> TrainingSample:
    return TrainingSample(segment, [1, 2], [3, 4, 5], [1, 0, 1], [-0.5, 0.0, -0.25], uid=uid, end="stop", reward=1.0)


def run_until_killed(path: Path, uids: list[str]) -> SamplesFile:
    """Write samples and do not finish, as a process that is killed."""
    file = SamplesFile(path)
    with file.open(anew=True):
        for uid in uids:
            file.write([sample(uid), sample(uid, "1")])
    return file


def uids_of(file: SamplesFile) -> list[str]:
    return [each.uid for each in read_jsonl(file.lines_path)]


def test_samples_of_rows_that_this_run_leaves_out_stay(tmp_path: Path) -> None:
    file = run_until_killed(tmp_path / "s.jsonl", ["u-row-1-1", "u-row-2-1", "orphan"])
    one, two = jobs_of(rows_of(tmp_path, {}, {}), 1)
    written(tmp_path / "r", [done(one, samples=2), done(two, samples=2)])
    results = ResultsFile(tmp_path / "r", EVALUATION, "1")
    results.resume([one])
    assert list(file.resume(results.results, results.other_uids)) == [(1, 1)]
    assert set(uids_of(file)) == {"u-row-1-1", "u-row-2-1"}


@pytest.mark.parametrize("name", ["s.jsonl", "s.parquet"])
def test_samples_without_a_result_and_results_without_samples_are_dropped(tmp_path: Path, name: str) -> None:
    file = run_until_killed(tmp_path / name, ["a", "b", "c", "orphan"])
    content = file.lines_path.read_bytes()
    file.lines_path.write_bytes(content[: content.rindex(b"\n", 0, -1) + 40])  # half a line
    jobs = jobs_of(rows_of(tmp_path, *[{}] * 5), 1)
    counts = {"a": 2, "b": 2, "c": 3, "gone": 2, "no samples": 0}
    results = {uid: done(job, uid=uid, samples=n) for job, (uid, n) in zip(jobs, counts.items(), strict=True)}
    assert list(SamplesFile(tmp_path / name).resume(results)) == ["a", "b", "no samples"]
    assert uids_of(file) == ["a", "a", "b", "b"]


def test_a_parquet_file_is_complete_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    file = run_until_killed(path, ["a"])
    assert (path.exists(), file.lines_path.name) == (False, "s.parquet.jsonl")
    file.finish()
    assert read_parquet(path) == [sample("a"), sample("a", "1")]
    assert not file.lines_path.exists()

    again = SamplesFile(path)
    [job] = jobs_of(rows_of(tmp_path, {}), 1)
    result = done(job, uid="a", samples=2)
    assert again.resume({"key": result}) == {"key": result}
    with again.open(anew=False):
        again.write([sample("b")])
    again.finish()
    assert [each.uid for each in read_parquet(path)] == ["a", "a", "b"]


def test_an_evaluation_without_token_ids_has_an_empty_samples_file(tmp_path: Path) -> None:
    run_until_killed(tmp_path / "s.parquet", []).finish()
    assert read_parquet(tmp_path / "s.parquet") == []


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AuthorError, match=r"must end in \.jsonl or \.parquet"):
        SamplesFile(tmp_path / "s.csv")
    (tmp_path / "s.jsonl").write_text('{"uid": "a"}\n[1]\n')
    with pytest.raises(AuthorError, match="this is not a sample; --overwrite starts again"):
        SamplesFile(tmp_path / "s.jsonl").resume({})
    (tmp_path / "s.parquet").write_bytes(b"no Parquet")
    with pytest.raises(AuthorError, match="--overwrite starts again"):
        SamplesFile(tmp_path / "s.parquet").resume({})


def test_many_samples_are_written_in_row_groups(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    file = SamplesFile(tmp_path / "s.parquet")
    many = [sample(str(number)) for number in range(2500)]
    write_jsonl(many, file.lines_path)
    file.finish()
    with pq.ParquetFile(tmp_path / "s.parquet") as found:
        assert found.num_row_groups == 3
    assert read_parquet(tmp_path / "s.parquet") == many

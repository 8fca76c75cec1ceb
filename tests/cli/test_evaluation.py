"""`rollout eval`: run an agent on a dataset, through the real server."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rollout_client.export import read_jsonl
from rollout_server.evaluation import results_file

from tests.cli.conftest import Invoke, complaint, document

SCRIPTED = ("eval", "agent.py", "dataset.jsonl", "--script", "scripted.py")
COUNTED = """
from pathlib import Path
from scripted import ScriptedModel


class Counting(ScriptedModel):
    def reply(self, messages):
        with Path("asked").open("a") as file:
            file.write("x")
        return super().reply(messages)
"""
SOMETIMES = """
import random
from rollout_server import Agent, Run, RewardResult


class Sometimes(Agent):
    name = "sometimes"

    async def reward(self, run: Run):
        if run.metadata["kind"] == "raises":
            raise LookupError("no such thing")
        if run.metadata["kind"] == "none":
            return None
        return RewardResult(run.metadata["ground_truth"], {"style": 0.5})
"""


def row(ground_truth: object, kind: str = "") -> dict[str, Any]:
    return {"system_prompt": "", "user_prompt": "hi", "ground_truth": ground_truth, "kind": kind}


def written(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def results(name: str = "dataset.results.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()[1:]]


def test_a_dataset_is_played_and_summed_up(project: Path, invoke: Invoke) -> None:
    told = invoke(*SCRIPTED, "-n", "2", "--min-pass-rate", "1", "--json")
    found = document(told)
    summary = found["summary"]
    assert (told.exit_code, found["passed"], found["unmet"]) == (0, True, [])
    assert (summary["rows"], summary["rollouts"], summary["pass_rate"], summary["mean_reward"]) == (3, 6, 1.0, 1.0)
    assert summary["pass_at"] == {"1": 1.0, "2": 1.0}
    assert summary["tool_calls"] == 6
    assert summary["seconds"]["p50"] <= summary["seconds"]["p99"]
    lines = results(found["files"]["results"])
    assert sorted((line["row"], line["repeat"]) for line in lines) == [(r, n) for r in (1, 2, 3) for n in (1, 2)]
    assert sum(line["tokens"]["generated"] for line in lines) == summary["tokens"]["generated"]
    assert "mississippi" in Path(found["files"]["report"]).read_text()


def test_what_is_there_is_not_played_again(project: Path, invoke: Invoke) -> None:
    """`--resume` runs only changed rows, and rows whose result line is truncated."""
    (project / "counted.py").write_text(COUNTED)
    asked = ("eval", "agent.py", "dataset.jsonl", "--script", "counted.py:Counting")
    assert invoke(*asked).exit_code == 0
    assert (project / "asked").read_text() == "x" * 6
    assert "use --resume to continue it" in complaint(invoke(*asked))
    assert invoke(*asked, "--resume").exit_code == 0
    assert (project / "asked").read_text() == "x" * 6

    kept = Path("dataset.results.jsonl")
    kept.write_bytes(kept.read_bytes()[:-20])
    data = Path("dataset.jsonl").read_text()
    whole = [json.loads(line) for line in kept.read_text().splitlines()[1:-1]]
    lost = {1, 2, 3} - {line["row"] for line in whole}
    Path("dataset.jsonl").write_text(data.replace("strawberry", "raspberry"))
    again = document(invoke(*asked, "--resume", "--json"))
    assert (again["summary"]["rollouts"], again["summary"]["pass_rate"]) == (3, 1.0)
    assert len((project / "asked").read_text()) == 6 + 2 * len(lost | {1})
    assert all(json.loads(line) for line in kept.read_text().splitlines())


def test_results_of_another_evaluation_are_not_mixed_in(project: Path, invoke: Invoke) -> None:
    assert invoke(*SCRIPTED).exit_code == 0
    changed = complaint(invoke(*SCRIPTED, "--resume", "--temperature", "0.5"))
    assert "endpoint.sampling.temperature was not set and is 0.5 in this run" in changed
    assert "exclude each other" in complaint(invoke(*SCRIPTED, "--resume", "--overwrite"))
    assert invoke(*SCRIPTED, "--overwrite", "--temperature", "0.5").exit_code == 0
    assert "is not a results file" in complaint(invoke(*SCRIPTED, "--resume", "--results", "agent.py"))


def test_failures_are_counted_told_and_played_again(project: Path, invoke: Invoke) -> None:
    (project / "sometimes.py").write_text(SOMETIMES)
    written(project / "d.jsonl", [row(1.0), row(0.25), row(0, "none"), row(0, "raises"), row(0, "raises")])
    told = invoke("eval", "sometimes.py", "d.jsonl", "--json")
    found = document(told)
    assert (told.exit_code, found["passed"]) == (1, False)
    assert found["unmet"] == ["2 of 5 rollouts failed"]
    summary = found["summary"]
    assert (summary["judged"], summary["passed"], summary["pass_rate"]) == (2, 1, 0.5)
    assert summary["failures"] == {"internal": 2}
    reason = "sometimes.py:11: LookupError: no such thing"
    assert told.stderr.count(f": {reason}") == 2  # the log once for both rollouts, and the summary
    failed = [each["message"] for each in results("d.results.jsonl") if each["end"] == "failure"]
    assert failed == [f"The agent's reward failed in turn 1: {reason}"] * 2
    assert results("d.results.jsonl")[0]["scores"] in ({"style": 0.5}, {})
    (project / "sometimes.py").write_text(SOMETIMES.replace("raise LookupError", "return 1.0  #"))
    del sys.modules["sometimes"]
    mended = document(invoke("eval", "sometimes.py", "d.jsonl", "--resume", "--json"))
    assert (mended["passed"], mended["summary"]["finished"]) == (True, 5)


def test_a_pass_rate_that_is_not_reached_is_a_failure(project: Path, invoke: Invoke) -> None:
    (project / "sometimes.py").write_text(SOMETIMES)
    written(project / "d.jsonl", [row(1.0), row(0.5)])
    asked = ("eval", "sometimes.py", "d.jsonl", "--overwrite")
    assert invoke(*asked, "--min-pass-rate", "0.5").exit_code == 0
    told = invoke(*asked, "--min-pass-rate", "0.6")
    assert told.exit_code == 1
    assert "the pass rate is 0.5; --min-pass-rate requires 0.6" in told.stdout
    assert invoke(*asked, "--min-pass-rate", "0.6", "--threshold", "0.5").exit_code == 0
    written(project / "d.jsonl", [row(0, "none")])
    told = invoke(*asked, "--min-pass-rate", "0")
    assert (told.exit_code, "no rollout has a reward" in told.stdout) == (1, True)


def test_an_endpoint_that_is_not_there_is_given_up(project: Path, invoke: Invoke) -> None:
    nobody = ("--model-url", "grpc://127.0.0.1:9", "--concurrency", "1", "--max-failures", "2")
    told = invoke("eval", "agent.py", "dataset.jsonl", *nobody, "--json", ROLLOUT_RETRIES="0")
    found = document(told)
    assert (told.exit_code, found["summary"]["failures"]) == (1, {"network": 2})
    assert "stopped early: --max-failures 2 is reached" in found["unmet"]
    told = invoke(
        "eval", "agent.py", "dataset.jsonl", *nobody, "--limit", "2", "--overwrite", "--json", ROLLOUT_RETRIES="0"
    )
    assert document(told)["unmet"] == ["2 of 2 rollouts failed"]  # none was left


def test_columns_limits_and_metadata_reach_the_rollouts(project: Path, invoke: Invoke) -> None:
    (project / "sometimes.py").write_text(SOMETIMES)
    (project / "d.csv").write_text("question,truth,kind\nhi,1,none\nho,2,none\n")
    mapped = ("--column", "user_prompt=question", "--column", "ground_truth=truth", "--column", "system_prompt=")
    told = invoke(
        "eval", "sometimes.py", "d.csv", *mapped, "--limit", "1", "--results", "out/r", "--report", "out/h", "--json"
    )
    assert document(told)["files"] == {"results": "out/r", "report": "out/h"}
    [line] = results("out/r")
    assert line["messages"][0] == {"role": "user", "content": "hi"}
    wrong = invoke("eval", "sometimes.py", "d.csv", "--column", "prompt=text")
    assert "d.csv:2: --column prompt=text: the row has no such column (columns: question, truth, kind)" in complaint(
        wrong
    )


@pytest.mark.parametrize("flags", [("-n", "0"), ("--concurrency", "0"), ("--min-pass-rate", "2")])
def test_numbers_out_of_range_are_refused(project: Path, invoke: Invoke, flags: tuple[str, ...]) -> None:
    told = invoke(*SCRIPTED, *flags, "--json")
    assert (told.exit_code, document(told)["error"]["kind"]) == (2, "usage")
    assert flags[0] in document(told)["error"]["message"]


def test_the_earlier_name_and_the_earlier_flag_still_work(project: Path, invoke: Invoke) -> None:
    for number, (name, flag) in enumerate((("test", "-n"), ("eval", "--repeats"), ("eval", "--n"))):
        told = invoke(name, *SCRIPTED[1:], flag, "2", "--results", f"{number}.jsonl", "--json")
        assert (told.exit_code, document(told)["summary"]["rollouts"]) == (0, 6)
    assert " test " not in invoke("--help").stdout


def test_results_have_their_row_and_columns_divide_the_figures(project: Path, invoke: Invoke) -> None:
    (project / "sometimes.py").write_text(SOMETIMES)
    rows = [row(1.0, "good"), row(0.0, "good"), row(0.5, "raises"), row(2.0)]
    rows[0]["info"] = {"level": "easy", "note": "x" * 100_000}
    written(project / "d.jsonl", rows)
    told = invoke("eval", "sometimes.py", "d.jsonl", "--by", "kind", "--by", "info.level", "--json")
    found = document(told)["summary"]
    assert {kind: (each["rollouts"], each["pass_rate"]) for kind, each in found["by"]["kind"].items()} == {
        "(empty)": (1, 1.0),
        "good": (2, 0.5),
        "raises": (1, None),
    }
    assert set(found["by"]["info.level"]) == {"(no value)", "easy"}
    assert found["reward"] == {"mean": 1.0, "error": pytest.approx((2 / 2 / 3) ** 0.5), "count": 3}
    assert found["scores"] == {"style": {"mean": 0.5, "error": 0.0, "count": 3}}
    first = min(results("d.results.jsonl"), key=lambda line: int(line["row"]))
    assert (first["prompt"], first["ground_truth"]) == ([{"role": "user", "content": "hi"}], 1.0)
    assert (first["metadata"]["kind"], first["metadata"]["info"]["level"]) == ("good", "easy")
    assert first["metadata"]["info"]["note"].endswith("(34464 more characters)")
    assert "<h2>By info.level</h2>" in Path("d.report.html").read_text()
    wrong = complaint(invoke("eval", "sometimes.py", "d.jsonl", "--by", "colour", "--overwrite"))
    assert "--by colour: no row has this metadata column; columns: ground_truth, kind, info" in wrong
    assert len(results("d.results.jsonl")) == 4


def test_samples_are_those_of_the_rollouts(project: Path, invoke: Invoke) -> None:
    asked = (*SCRIPTED, "--n", "2", "--samples", "s.jsonl", "--json")
    found = document(invoke(*asked))
    assert found["files"]["samples"] == "s.jsonl"
    lines = {line["uid"]: line for line in results()}
    samples = list(read_jsonl("s.jsonl"))
    assert sorted(sample.uid for sample in samples) == sorted(lines)
    for sample in samples:
        line = lines[sample.uid]
        assert (sample.rollout_id, sample.group_id) == (line["rollout_id"], f"row-{line['row']}")
        assert (sample.reward, line["samples"], sample.verified) == (1.0, 1, True)
        assert sum(sample.response_mask) == line["tokens"]["generated"]
        assert sample.logprobs is not None
    assert "already exists" in complaint(invoke(*SCRIPTED, "--results", "other.jsonl", "--samples", "s.jsonl"))
    assert 'samples was "s.jsonl" and is not set in this run' in complaint(invoke(*SCRIPTED, "--resume"))
    same = complaint(invoke(*SCRIPTED, "--overwrite", "--results", "s.jsonl", "--samples", "s.jsonl"))
    assert "must be different files" in same
    Path("s.jsonl").unlink()
    again = document(invoke(*asked, "--resume"))
    assert (again["resumed"]["results"], again["summary"]["rollouts"]) == (0, 6)
    assert len(list(read_jsonl("s.jsonl"))) == 6


def test_what_changed_is_named_before_it_runs_again(project: Path, invoke: Invoke) -> None:
    assert invoke(*SCRIPTED).exit_code == 0
    data, agent = Path("dataset.jsonl"), Path("agent.py")
    data.write_text(data.read_text().replace("mississippi", "missouri").replace('"4"', '"2"'))
    agent.write_text(f"{agent.read_text()}\n# changed\n")
    sys.modules.pop("agent", None)
    told = invoke(*SCRIPTED, "--resume")
    assert "changed since the earlier results, so they run again: rows 2\n" in told.stdout
    assert "the agent's code changed since the earlier results, which stay; --overwrite starts again" in told.stdout
    assert "3/3 · mean reward 1.000 · 0 failed" in told.stdout
    resumed = document(invoke(*SCRIPTED, "--resume", "--json"))["resumed"]
    assert resumed == {"results": 3, "changed_rows": [], "code_changed": True}


def test_no_file_of_the_evaluation_replaces_its_dataset(project: Path, invoke: Invoke) -> None:
    data = Path("dataset.jsonl").read_bytes()
    for flag in ("--results", "--report", "--samples"):
        told = complaint(invoke(*SCRIPTED, "--overwrite", flag, "../letter-counter/dataset.jsonl"))
        assert "--results, --report, --samples and the dataset must be different files" in told
    assert Path("dataset.jsonl").read_bytes() == data


@pytest.mark.parametrize("threshold", ["nan", "inf"])
def test_a_threshold_is_a_finite_number(project: Path, invoke: Invoke, threshold: str) -> None:
    told = complaint(invoke(*SCRIPTED, "--threshold", threshold))
    assert f"--threshold must be a finite number, not {threshold}" in told


def test_another_choice_of_rows_keeps_the_samples_of_the_others(project: Path, invoke: Invoke) -> None:
    asked = (*SCRIPTED, "--samples", "s.jsonl", "--json")
    assert document(invoke(*asked))["summary"]["rollouts"] == 3
    fewer = document(invoke(*asked, "--resume", "--limit", "1"))
    assert (fewer["summary"]["rollouts"], fewer["resumed"]["results"]) == (1, 1)
    assert len(list(read_jsonl("s.jsonl"))) == 3
    assert document(invoke(*asked, "--resume"))["resumed"]["results"] == 3


def test_a_disk_that_fills_up_is_reported_in_one_line(
    project: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = "rollout eval: {}: cannot be written: No space left on device; what it contains stays"
    Path("full").symlink_to("/dev/full")
    assert complaint(invoke(*SCRIPTED, "--results", "full")).startswith(full.format("full"))

    def append(_file: object, content: bytes, path: Path) -> None:
        with open("/dev/full", "wb", buffering=0) as file:
            results_file.append(file, content, path)

    monkeypatch.setattr("rollout_server.evaluation.samples_file.append", append)
    told = complaint(invoke(*SCRIPTED, "--samples", "s.jsonl"))
    assert (told.count("\n"), told.startswith(full.format("s.jsonl"))) == (1, True)
    assert not Path("dataset.report.html").exists()


def test_an_agent_with_a_reward_over_groups_is_told_that_it_is_not_called(project: Path, invoke: Invoke) -> None:
    note = "reward_group and the rubric's group functions are not called"
    assert note not in invoke(*SCRIPTED).stdout
    agent = Path("agent.py")
    agent.write_text(
        f"{agent.read_text()}\n    async def reward_group(self, runs):\n        return [0.0 for _ in runs]\n"
    )
    sys.modules.pop("agent", None)
    told = invoke(*SCRIPTED, "--overwrite")
    assert note in told.stdout
    assert "mean reward  1 " in told.stdout


def test_help_shows_flags_under_headings(invoke: Invoke) -> None:
    told = invoke("eval", "--help", COLUMNS="120").stdout
    places = [
        told.index(text)
        for text in ("─ Options", "─ Files", "--samples", "─ Dataset", "--split", "─ Model", "--script")
    ]
    assert places == sorted(places)


def test_names_of_files_cannot_control_the_terminal(project: Path, invoke: Invoke) -> None:
    Path("dataset.jsonl").rename("\x1b[31m[red].jsonl")
    told = invoke("eval", "agent.py", "\x1b[31m[red].jsonl", *SCRIPTED[3:])
    assert told.exit_code == 0
    assert "␛[31m[red].report.html" in told.stdout
    assert "\x1b" not in told.stdout + told.stderr

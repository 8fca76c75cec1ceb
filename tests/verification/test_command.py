"""The command `rollout verify`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from rollout_server.cli.commands import app
from rollout_server.verification.findings import FindingKind, Severity
from typer.testing import CliRunner

from tests.support.processes import environment
from tests.verification.rows import FORMATS, SampleShape, rows


def run(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["verify", *map(str, arguments)], env={"COLUMNS": "200"})
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    path = tmp_path / "sound.jsonl"
    path.write_text(FORMATS[SampleShape.VERL](rows(Random(1))))
    return path


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    made = rows(Random(2))
    made[0].mask = [1] * len(made[0].mask)
    made[3].logprobs[0] = 0.5
    path = tmp_path / "faulty.jsonl"
    path.write_text(FORMATS[SampleShape.GENERIC](made))
    return path


def test_sound_samples_in_a_process_of_its_own(sound: Path) -> None:
    command = [sys.executable, "-m", "rollout_server.cli", "verify", str(sound), "--tokenizer", "toy"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, env=environment())
    assert (done.returncode, done.stderr) == (0, "")
    assert "rows: 6 verl; " in done.stdout
    assert "completions encode to other tokens than were sampled, which is normal" in done.stdout
    assert done.stdout.splitlines()[-1] == "OK: no fatal findings, 0 warnings"


def test_findings_are_printed_with_their_place(faulty: Path, sound: Path) -> None:
    code, out, err = run(sound, faulty)
    assert (code, err) == (1, "")
    *table, first, second, totals, verdict = out.splitlines()
    assert (
        first == f"FATAL {faulty}, line 4: rollout_log_probs[0]: 0.5 is no logprob: it must be finite and not above 0"
    )
    assert second.startswith(f"WARN {faulty}, line 1: loss_mask[")
    assert [line.split()[:3] for line in table] == [["FATAL", "1", "logprobs"], ["WARN", "1", "all_ones"]]
    assert totals.startswith("rows: 6 verl, 6 generic; ")
    assert verdict == "FATAL: 1 findings, 1 warnings; do not train on these samples"


def test_a_warning_alone_is_no_failure(tmp_path: Path) -> None:
    made = rows(Random(2))
    made[0].mask = [1] * len(made[0].mask)
    path = tmp_path / "s"
    path.write_text(FORMATS[SampleShape.GENERIC](made))
    assert run(path)[0] == 0


def test_the_limit_bounds_what_is_printed_not_what_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("x\n" * 50)
    code, out, _ = run(path, "--limit", "2")
    assert code == 1
    assert out.count("FATAL " + str(path)) == 2
    assert "... and 48 more; --limit 50 prints all" in out
    assert run(path, "--limit", "50")[1].count("FATAL " + str(path)) == 50


def test_json(faulty: Path) -> None:
    code, out, err = run(faulty, "--json")
    told = json.loads(out)
    assert (code, err, told["ok"], told["fatal"], told["warnings"]) == (1, "", False, 1, 1)
    assert (told["rows"], told["kinds"]) == ({"generic": 6}, {"logprobs": 1, "all_ones": 1})
    assert told["findings"][0] == {
        "severity": "FATAL",
        "kind": "logprobs",
        "file": str(faulty),
        "row": 4,
        "field": "rollout_log_probs",
        "index": 0,
        "text": "0.5 is no logprob: it must be finite and not above 0",
    }


def test_text_of_the_file_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text(
        json.dumps({"\x1b[2J[red]": 1}) + "\n" + json.dumps({"response_ids": ["\x1b[31m"], "prompt_ids": []})
    )
    code, out, _ = run(path)
    assert code == 1
    assert "\x1b" not in out
    assert "[red]" in out


def test_a_shape_can_be_forced(sound: Path) -> None:
    code, out, _ = run(sound, "--shape", "openenv")
    assert code == 1
    assert "a list of turns is needed" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["gone.jsonl"], "gone.jsonl"),
        (["."], "."),
        ([], "FILE"),
        (["SOUND", "--shape", "slime"], "slime"),
        (["SOUND", "--limit", "-1"], "--limit"),
        (["SOUND", "--tokenizer", "./gone"], "the directory ./gone does not exist"),
    ],
)
def test_wrong_usage(sound: Path, arguments: list[str], text: str) -> None:
    code, out, err = run(*(str(sound) if each == "SOUND" else each for each in arguments))
    assert (code, out) == (2, "")
    assert text in err


def test_the_page_lists_all_kinds() -> None:
    page = (Path(__file__).parents[2] / "docs" / "verify.md").read_text()
    listed = [line.split(" | ")[:2] for line in page.splitlines() if line.startswith("| `")]
    found = {
        (code.strip("| `"), severity) for code, severity in listed if severity in {each.value for each in Severity}
    }
    assert found == {(kind.code, kind.severity.value) for kind in FindingKind}

"""`make learn`, shortened: two steps of GRPO, whose masks and rows it checks itself. `test_trl` shows that runs repeat exactly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.conftest import ROOT

pytest.importorskip("trl")


def learn(results: Path, *flags: str) -> list[dict[str, Any]]:
    """Run examples/learn and return the lines of its results."""
    command = [sys.executable, "examples/learn", "--quick", "--steps", "2", "--results", str(results), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in results.read_text().splitlines()]


@pytest.mark.heavy  # 20 s of CPU, most of them to load libraries and to start a server
@pytest.mark.timeout(300)
def test_every_mask_equals_the_ledger(tmp_path: Path) -> None:
    [done] = learn(tmp_path / "results.jsonl")
    assert done["rows"] == 2 * 8 * 8
    # There are tool results in the rows, so the masks that were compared are not all ones.
    assert done["environment_tokens"] > 0


def test_the_picture_and_the_table_are_those_of_the_results(tmp_path: Path) -> None:
    results, drawn = ROOT / "examples/learn/results.jsonl", tmp_path / "new" / "curves.svg"
    command = [sys.executable, "examples/learn/picture.py", str(results), str(drawn)]
    table = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert drawn.read_text() == (ROOT / "docs/images/learning.svg").read_text()
    assert table.strip() in (ROOT / "docs/learning.md").read_text(encoding="utf-8")


def test_other_results_do_not_replace_the_published_picture() -> None:
    def drawn(*variables: str) -> list[str]:
        made = subprocess.run(
            ["make", "-n", "--no-print-directory", "learn-picture", *variables],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        return made.stdout.splitlines()[-1].split()[-2:]

    assert drawn() == ["examples/learn/results.jsonl", "docs/images/learning.svg"]
    assert drawn("RESULTS=mine.jsonl") == ["mine.jsonl", "build/learn/learning.svg"]
    assert drawn("RESULTS=mine.jsonl", "OUT=mine.svg") == ["mine.jsonl", "mine.svg"]

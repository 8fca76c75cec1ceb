"""The examples, each tried as its README says, in its own folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
FOLDERS = sorted(path.parent.name for path in EXAMPLES.glob("*/agent.py"))


def test_there_are_examples() -> None:
    assert {"calculator", "python", "search"} <= set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_its_tests_pass(folder: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=EXAMPLES / folder, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout

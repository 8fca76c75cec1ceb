"""The examples, each tried as its README says, in its own folder."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.processes import environment

EXAMPLES = Path(__file__).parent.parent / "examples"
FOLDERS = sorted(path.parent.name for path in EXAMPLES.glob("*/agent.py"))


def test_there_are_examples() -> None:
    assert {"calculator", "python", "search"} <= set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_its_tests_pass(folder: str) -> None:
    assert " passed" in run_in(EXAMPLES / folder, "-m", "pytest", "-q", "-p", "no:cacheprovider")


@pytest.mark.parametrize("folder", FOLDERS)
def test_its_one_command(folder: str, tmp_path: Path) -> None:
    here = shutil.copytree(EXAMPLES / folder, tmp_path / folder)
    (block,) = re.findall(r"```sh\n(.*?)\n```", (here / "README.md").read_text(), re.DOTALL)
    program, *arguments = shlex.split(block)
    assert program == "rollout"
    assert "100.0%" in run_in(here, "-m", "rollout_server.cli", *arguments)


def run_in(folder: Path, *arguments: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

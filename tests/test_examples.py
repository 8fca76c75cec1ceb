"""The examples, run in their folders as their READMEs say."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Invoke, here, invoke
from tests.support.processes import environment

__all__ = ["here", "invoke"]

EXAMPLES = Path(__file__).parent.parent / "examples"
FOLDERS = sorted(path.parent.name for path in EXAMPLES.glob("*/agent.py"))
# The README's command, without installed plugins that cost each process a second.
TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", "-p", "no:hypothesispytest")


def test_there_are_examples() -> None:
    assert {"calculator", "judge", "python", "search", "simulated_user"} <= set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_its_tests_pass(folder: str) -> None:
    done = subprocess.run(
        [sys.executable, *TESTS],
        cwd=EXAMPLES / folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.parametrize("folder", FOLDERS)
def test_its_one_command(folder: str, here: Path, invoke: Invoke) -> None:
    shutil.copytree(EXAMPLES / folder, here, dirs_exist_ok=True)
    (block,) = re.findall(r"```sh\n(.*?)\n```", (here / "README.md").read_text(), re.DOTALL)
    program, *arguments = shlex.split(block)
    assert program == "rollout"
    told = invoke(*arguments)
    assert (told.exit_code, "100.0%" in told.stdout) == (0, True), told.stdout + told.stderr

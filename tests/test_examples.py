"""The examples, run in their folders as their READMEs say."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Invoke, here, invoke
from tests.support.examples import EXAMPLES, FOLDERS, readme_command
from tests.support.forking import forker
from tests.support.processes import environment

__all__ = ["here", "invoke"]

# The README's command, without installed plugins that cost each process a second.
TESTS = ("-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", "-p", "no:hypothesispytest")


def test_there_are_examples() -> None:
    assert {"calculator", "judge", "python", "search", "simulated_user", "shop", "sandboxed_code"} <= set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_it_is_short(folder: str) -> None:
    assert len((EXAMPLES / folder / "agent.py").read_text().splitlines()) <= 60


@pytest.mark.parametrize("folder", FOLDERS)
async def test_its_tests_pass(folder: str) -> None:
    process = await forker().fork(*TESTS, cwd=EXAMPLES / folder, env=environment(), module="pytest")
    output = (await process.stderr.read()).decode()
    assert await process.wait() == 0, output
    assert " passed" in output


@pytest.mark.parametrize("folder", FOLDERS)
def test_its_one_command(folder: str, here: Path, invoke: Invoke) -> None:
    shutil.copytree(EXAMPLES / folder, here, dirs_exist_ok=True)
    told = invoke(*readme_command(here))
    assert (told.exit_code, "100.0%" in told.stdout) == (0, True), told.stdout + told.stderr

"""`rollout new`: the project runs unchanged."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from rollout_server.authoring.project import class_name

from tests.cli.conftest import Invoke, complaint, document


def test_the_readmes_two_commands_run_as_they_stand(here: Path, invoke: Invoke) -> None:
    """The first command, which runs the project's own tests, is covered by tests/test_readme.py."""
    made = invoke("new", "letter-counter")
    folder = here / "letter-counter"
    shown = re.search(r"```sh\n(.*?)\n```", (folder / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    lines = shown[1].splitlines()
    assert made.stdout.rstrip().endswith("\n  ".join(lines))
    os.chdir(folder)
    first, second = lines
    assert first == "python -m pytest"
    program, *arguments = shlex.split(second)
    assert program == "rollout"
    told = invoke(*arguments)
    assert (told.exit_code, "100.0%" in told.stdout) == (0, True), told.stdout + told.stderr


def test_the_commands_of_the_page_run_as_they_stand(here: Path, invoke: Invoke) -> None:
    page = (Path(__file__).parents[2] / "docs" / "authors.md").read_text()
    block, *_ = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)  # the others need a running server
    for program, *arguments in map(shlex.split, block.splitlines()):
        if program == "cd":
            os.chdir(arguments[0])
            continue
        told = invoke(*arguments)
        assert (program, told.exit_code) == ("rollout", 0), told.stdout + told.stderr


def test_the_project_is_valid(project: Path, invoke: Invoke) -> None:
    found = document(invoke("validate", "agent.py", "--json"))
    assert found["valid"]
    assert [(agent["name"], agent["errors"], agent["advice"]) for agent in found["agents"]] == [
        ("letter-counter", [], [])
    ]
    assert [(tool["errors"], tool["advice"]) for tool in found["agents"][0]["tools"]] == [([], [])]


@pytest.mark.parametrize(
    "name", ["", "Upper", "a b", "../up", "a/b", "-x", "x-", "a--b", "1st", "class", "ä", "x" * 65, "a\n"]
)
def test_a_name_that_is_none_is_refused(here: Path, invoke: Invoke, name: str) -> None:
    assert repr(name) in complaint(invoke("new", "--", name))
    assert list(here.iterdir()) == []


def test_nothing_is_overwritten(here: Path, invoke: Invoke) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "kept.txt").write_text("kept")
    assert "mine is not empty" in complaint(invoke("new", "mine"))
    assert [path.name for path in (here / "mine").iterdir()] == ["kept.txt"]
    (here / "file").write_text("")
    assert "file is a file" in complaint(invoke("new", "file"))


def test_an_empty_folder_will_do_and_json_lists_the_files(here: Path, invoke: Invoke) -> None:
    (here / "deep" / "mine").mkdir(parents=True)
    found = document(invoke("new", "mine", "--in", "deep", "--json"))
    assert found["project"]["directory"] == "deep/mine"
    assert all((here / "deep" / "mine" / name).is_file() for name in found["project"]["files"])
    assert found["next"][0] == "cd deep/mine"
    assert document(invoke("new", "mine", "--in", "two words", "--json"))["next"][0] == "cd 'two words/mine'"
    (here / "file").write_text("")
    assert "rollout new: file/mine: Not a directory" in complaint(invoke("new", "mine", "--in", "file"))


def test_a_class_has_no_name_that_its_file_imports() -> None:
    assert [class_name(name) for name in ("letter-counter", "agent", "run")] == ["LetterCounter", "MyAgent", "MyRun"]
    assert class_name("limits") == "MyLimits"

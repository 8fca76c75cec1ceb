"""Every `rollout ...` line in README, docs and examples is a valid command with valid flags."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rollout_server.cli.commands import app

from tests.cli.conftest import Invoke

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
LINE = re.compile(r"^(?:[A-Z_]+=(?:'[^']*'|\S*)\s+)*rollout (.*)$", re.MULTILINE)


def commands() -> list[str]:
    """The arguments of all `rollout` commands."""
    found = set()
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
            found |= {re.split(r"\s(?:&&|>>|\||#)", line)[0] for line in LINE.findall(block.replace("\\\n", " "))}
    return sorted(found)


@pytest.mark.parametrize("line", commands())
def test_it_is_a_command(line: str, invoke: Invoke) -> None:
    # --help parses the whole line and runs nothing. What follows `--` is the command of another program.
    own, separator, other = line.partition(" -- ")
    told = invoke(*shlex.split(own), "--help", *([separator.strip(), *shlex.split(other)] if separator else []))
    assert told.exit_code == 0, told.output


def helps(command: Any, path: str = "rollout") -> Iterator[tuple[str, str]]:
    """Command and line of each help text. Lines of the first paragraph are joined, all others are printed as written."""
    for name, each in getattr(command, "commands", {}).items():
        yield from helps(each, f"{path} {name}")
    _, _, paragraphs = inspect.cleandoc(command.help or "").partition("\n\n")
    yield from ((path, line) for line in paragraphs.splitlines())


def test_the_lines_of_a_help_text_fit_a_terminal() -> None:
    found = list(helps(typer.main.get_command(app)))
    assert len(found) > 100
    assert [each for each in found if len(each[1]) > 78] == []


def test_there_are_many() -> None:
    assert len(commands()) > 15


@pytest.mark.parametrize("line", ["serv", "serve --no-such-flag", "tokens chek"])
def test_what_is_none_is_found(line: str, invoke: Invoke) -> None:
    assert invoke(*shlex.split(line), "--help").exit_code == 2

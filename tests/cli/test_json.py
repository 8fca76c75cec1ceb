"""`--json` of each command, and errors for invalid command lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Invoke, complaint, document

COMMANDS = (
    ("new",),
    ("serve",),
    ("validate",),
    ("run",),
    ("test",),
    ("ps",),
    ("deliveries",),
    ("start",),
    ("watch",),
    ("cancel",),
    ("gateway",),
    ("trainer",),
    ("demo",),
    ("inspect",),
    ("view",),
    ("config",),
    ("version",),
    ("journal", "drop"),
    ("keys", "new"),
    ("tokens", "check"),
    ("verify",),
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_each_command_has_it_and_tells_usage_in_it(invoke: Invoke, command: tuple[str, ...]) -> None:
    assert "--json" in invoke(*command, "--help").stdout
    told = invoke(*command, "--no-such-flag", "--json")
    assert (told.exit_code, told.stderr) == (2, "")
    error = document(told)["error"]
    assert (error["command"], error["kind"]) == (command[0], "usage")
    assert "--no-such-flag" in error["message"]


def test_without_it_people_are_told(invoke: Invoke) -> None:
    told = invoke("run", "--no-such-flag")
    assert "--no-such-flag" in complaint(told)
    assert told.stdout == ""


def test_what_stands_behind_two_dashes_is_no_flag(invoke: Invoke) -> None:
    assert "--json" in complaint(invoke("new", "--", "--json"))


def test_the_version_is_a_flag_too(invoke: Invoke) -> None:
    flag, command = invoke("--version"), invoke("version")
    assert (flag.exit_code, flag.stdout, flag.stderr) == (0, command.stdout, "")
    assert "--version" in invoke("--help").stdout
    assert "multi-turn, tool-using agents" in invoke("--help").stdout


def test_small_commands_answer(invoke: Invoke) -> None:
    assert set(document(invoke("version", "--json"))) == {"version"}
    told = document(invoke("keys", "new", "ci", "--json"))
    assert set(told) == {"key", "entry"}
    assert told["key"] not in told["entry"]


def test_whoever_interrupts_a_command_is_told_in_it(here: Path, invoke: Invoke) -> None:
    Path("agent.py").write_text("raise KeyboardInterrupt")
    told = invoke("validate", "agent.py", "--json")
    assert (told.exit_code, document(told)["error"]["message"]) == (130, "interrupted")


def test_a_failure_names_its_command(invoke: Invoke) -> None:
    told = invoke("serve", "gone.py", "--json")
    assert (told.exit_code, told.stderr) == (1, "")
    assert json.loads(told.stdout)["error"] == {
        "command": "serve",
        "kind": "failed",
        "message": "there is no file gone.py",
    }

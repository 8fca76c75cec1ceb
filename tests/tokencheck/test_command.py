"""The command `rollout tokens check`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rollout_server.cli.commands import app
from typer.testing import CliRunner

from tests.tokencheck.conftest import spoilt


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["tokens", "check", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_toy_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "rollout_server.cli", "tokens", "check", "--tokenizer", "toy"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    for text in ("Stable", "<|im_end|> (793)", "parallel calls", "What to do", "do not count by lengths"):
        assert text in done.stdout


def test_json_is_all_there_is_on_standard_output(tmp_path: Path) -> None:
    template = tmp_path / "bad.jinja"
    template.write_text(spoilt(("{{- content -}}", "{{- content | trim -}}")), encoding="utf-8")
    code, out, err = run("--tokenizer", "toy", "--template", str(template), "--json")
    told = json.loads(out)
    assert (code, err, told["stable"], told["usable"]) == (1, "", False, True)
    assert [finding["fault"] for finding in told["faults"]] == ["white space changed"]
    assert told["template"] == str(template)
    assert told["stops"]["final"] == {"text": "<|im_end|>", "id": 793, "opens_next": False}
    assert told["traits"]["arguments"] == {"received": "as they are", "parsed": "as they are"}


def test_what_was_there_is_shown_escaped(tmp_path: Path) -> None:
    """A template must not control the terminal."""
    template = tmp_path / "bad.jinja"
    escape = "{{- '\x1b[2J[red]' ~ messages | length -}}{%- for message in messages -%}"
    template.write_text(spoilt(("{%- for message in messages -%}", escape)), encoding="utf-8")
    code, out, _ = run("--tokenizer", "toy", "--template", str(template))
    assert code == 1
    assert "\x1b[2J" not in out
    assert "Not stable" in out


def test_a_refusal_is_explained(tmp_path: Path) -> None:
    template = tmp_path / "bad.jinja"
    template.write_text("{{ raise_exception('Ask me tomorrow.') }}", encoding="utf-8")
    code, out, _ = run("--tokenizer", "toy", "--template", str(template))
    assert code == 2
    assert "Cannot be used" in out
    assert "Ask me tomorrow." in out


def test_template_arguments_reach_the_template(tmp_path: Path) -> None:
    template = tmp_path / "picky.jinja"
    picky = "{%- if mood is defined and mood != 'good' -%}{{- raise_exception('Not now.') -}}{%- endif -%}"
    loop = "{%- for message in messages -%}"
    template.write_text(spoilt((loop, picky + loop)), encoding="utf-8")
    arguments = ("--tokenizer", "toy", "--template", str(template), "--template-arg")
    assert run(*arguments, 'mood="good"')[0] == 0
    code, out, _ = run(*arguments, 'mood="bad"')
    assert code == 2
    assert "Not now." in out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--tokenizer", "./nowhere"], "the directory ./nowhere does not exist"),
        (["--tokenizer", "toy", "--template", "nowhere.jinja"], "nowhere.jinja"),
        (["--tokenizer", "toy", "--conversations", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--tokenizer", "toy", "--template-arg", "thinking"], "'thinking' is not KEY=JSON"),
        (["--tokenizer", "toy", "--template-arg", "thinking=yes"], "'yes' is not JSON"),
        (["--tokenizer", "toy", "--template-arg", "tokenize=true"], "cannot be named tokenize"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: list[str], reason: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert reason in err


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    code, _, err = run("--tokenizer", str(tmp_path))
    assert code == 2
    assert "cannot be read as a tokenizer" in err

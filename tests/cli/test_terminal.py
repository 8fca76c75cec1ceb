"""Foreign text is escaped for terminals: no escape sequence takes effect, and no line can imitate the command's own output."""

from __future__ import annotations

import subprocess
import sys

from rollout_server.inspection.escape import visible_lines

from tests.cli.conftest import Invoke

EVIL = "\x1b[2J\x1b]0;title\x07\r\x9b2J\u202egnp.exe\nERROR    forged: all is lost"
DOING = "\x1b\x07\r\x9b\u202e"

LOGGED = """
import logging, sys
from rollout_server import logs
logs.set_up("text", "info")
evil = sys.argv[1]
logging.getLogger("x").warning("the receiver said %s", evil, extra={"rollout_id": evil})
try:
    raise LookupError(evil)
except LookupError:
    logging.getLogger("x").exception("a fault")
"""


def check(text: str) -> None:
    assert text.strip()
    assert not set(DOING) & set(text)
    assert not any(line.startswith("ERROR    forged") for line in text.split("\n"))


def test_lines_of_a_text_are_set_apart() -> None:
    assert visible_lines("one\ntwo\x1b[2J") == "one\n    two␛[2J"
    assert visible_lines("plain") == "plain"


def test_log_lines() -> None:
    done = subprocess.run([sys.executable, "-c", LOGGED, EVIL], capture_output=True, text=True, check=True)
    check(done.stderr)
    assert "Traceback" in done.stderr


def test_complaints(invoke: Invoke) -> None:
    for command in ("run", "validate", "inspect", "test"):
        result = invoke(command, f"no\x1b[2J\u202e{EVIL}.py:Agent")
        assert result.exit_code
        check(result.stderr)


def test_a_tokenizer_that_is_not_there(invoke: Invoke) -> None:
    result = invoke("tokens", "check", "--tokenizer", EVIL.replace("\n", " "))
    assert result.exit_code == 2
    check(result.output)

"""Foreign text is escaped for terminals: no escape sequence takes effect, and no line can imitate the command's own output."""

from __future__ import annotations

import io
import subprocess
import sys

from rich.console import Console
from rollout_server.cli.eval_output import show_progress, show_summary
from rollout_server.evaluation.progress import RunningFigures
from rollout_server.evaluation.row_result import RowResult
from rollout_server.evaluation.summary import summary_of
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
    for command in ("run", "validate", "inspect", "eval"):
        result = invoke(command, f"no\x1b[2J\u202e{EVIL}.py:Agent")
        assert result.exit_code
        check(result.stderr)


def test_the_summary_of_an_evaluation() -> None:
    failed = RowResult("r", "failure", EVIL, EVIL, row=1, failure_class=EVIL)
    scored = [RowResult("r", "stop", EVIL, reward=1.0, scores={EVIL: 0.5}, row=row) for row in (2, 3)]
    summary = summary_of([failed, *scored], 1.0, {EVIL: {1: EVIL, 2: EVIL, 3: "3"}})
    out = io.StringIO()
    show_summary(Console(file=out, width=60), summary, ["1 of 3 failed"], {"results": "r", "report": "h"})
    check(out.getvalue())
    assert "0.5 ± 0" in out.getvalue()


def test_a_terminal_has_one_line_of_progress_and_a_file_has_some() -> None:
    shown = {}
    for terminal in (True, False):
        out = io.StringIO()
        console = Console(file=out, width=100, force_terminal=terminal)
        figures = RunningFigures(100, [], lambda: 0.0)
        with show_progress(console, figures) as update:
            for row in range(100):
                figures.add(RowResult("r", "stop", "stop", reward=row % 2, row=row))
                update()
        shown[terminal] = out.getvalue()
    assert "100/100 · mean reward 0.500 · 0 failed" in shown[True]
    lines = shown[False].splitlines()
    assert (len(lines), lines[0], lines[-1]) == (
        10,
        "10/100 · mean reward 0.500 · 0 failed · 0:00 left",
        "100/100 · mean reward 0.500 · 0 failed",
    )


def test_a_tokenizer_that_is_not_there(invoke: Invoke) -> None:
    result = invoke("tokens", "check", "--tokenizer", EVIL.replace("\n", " "))
    assert result.exit_code == 2
    check(result.output)


def test_the_garbage_collector_has_nothing_to_scan_when_a_command_exits() -> None:
    """A server has hundreds of thousands of objects at its end. Functions registered with atexit run in reverse order."""
    program = (
        "import atexit, gc, sys; from rollout_server.cli import main; sys.argv = ['rollout', 'version']; {}; main()"
    )
    last = "atexit.register(lambda: print(gc.get_freeze_count() > 10_000, len(gc.get_objects()) < 1_000))"
    done = subprocess.run([sys.executable, "-c", program.format(last)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True True"

"""What a type checker says of authors' code is what `tests/typing` says it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_authors_code_is_typed() -> None:
    command = [sys.executable, "-m", "mypy", "tests/typing/authors.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout

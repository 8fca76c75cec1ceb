"""The server of the tests of adapters, in a process and an environment of its own.

The tests of a framework run in its environment, without the product and without `tests/conftest.py`: see `make adapters`.
A file `test_NAME.py` is collected only where the package NAME is installed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORKS = ("trl", "openenv", "verl")

collect_ignore = [f"test_{name}.py" for name in FRAMEWORKS if find_spec(name) is None]


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Address of a rollout server with the agents of the scenarios and the tokenizer "toy"."""
    with program("tests.adapters.server") as port:
        yield f"127.0.0.1:{port}"


@contextmanager
def program(module: str) -> Iterator[str]:
    """Run a module of the tests in the environment of the product, and return the first line that it prints."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ROLLOUT_"))}
    command = [ROOT / ".venv/bin/python", "-m", module]
    with subprocess.Popen(
        command, cwd=ROOT, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            assert line, f"{module} did not start; its standard error says why"
            yield line
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(30)

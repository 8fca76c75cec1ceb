"""A project made by `rollout new`, and commands that run in this process."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rollout_server.authoring.project import make_project
from rollout_server.cli.commands import app
from typer.testing import CliRunner, Result

from tests.support.processes import environment

Invoke = Callable[..., Result]


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """An empty working directory. Modules imported from it are unloaded after the test."""
    path, modules = list(sys.path), set(sys.modules)
    with contextlib.chdir(tmp_path):
        yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def project(here: Path) -> Path:
    """The project of `rollout new letter-counter`, as the working directory."""
    make_project("letter-counter", here)
    os.chdir(here / "letter-counter")
    return here / "letter-counter"


@pytest.fixture
def invoke(here: Path) -> Invoke:
    """`invoke(*arguments)`: run a command in this process, in the empty directory."""
    clean = environment()

    def invoked(*arguments: str, **env: str) -> Result:
        unset = dict.fromkeys(os.environ.keys() - clean.keys())
        return CliRunner().invoke(app, arguments, env={**unset, **clean, **env})

    return invoked


def document(result: Result) -> dict[str, Any]:
    """The single JSON object on standard output."""
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def complaint(result: Result) -> str:
    """The error text of a failed command."""
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (1, 2)
    assert "Traceback" not in result.stderr
    return result.stderr

"""The example in the working directory, for `rollout serve`: it appends the calls of its methods to the file EXAMPLE_CALLS."""

from __future__ import annotations

import os
from pathlib import Path

from rollout_server import Run

from tests.support.examples import load_example, watch_methods

_calls = os.open(os.environ["EXAMPLE_CALLS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _write(name: str, run: Run) -> None:
    os.write(_calls, f"{run.rollout_id} {name}\n".encode())


AGENT = load_example(Path.cwd()).agent
watch_methods(AGENT, _write)

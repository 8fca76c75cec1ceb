"""Claude Code, Codex and OpenCode, unchanged and headless: `make test-clients`. `RECORD=1` writes the shapes of what they send."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.clients.command_lines import ANSWER, CLIS, DOORS, MORE, TASK, WINDOWS, model
from tests.clients.service import PROGRAMS, Captured, check_captured, serving_world, text
from tests.clients.shapes import FOLDER, shapes, write

pytestmark = pytest.mark.skipif(
    "ROLLOUT_CLIS" not in os.environ, reason="`make test-clients` installs and runs the command-line agents"
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["claude_code", "codex", "opencode"])
async def test_a_command_line_agent_is_captured_exactly(name: str, tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "work"
    home.mkdir(), folder.mkdir()
    said = model(name)
    path = f"{CLIS}/node_modules/.bin:{os.environ['PATH']}"
    async with serving_world(said) as world:
        found = await world.capture(
            ["sh", str(PROGRAMS / f"{name}.sh")], folder=folder, HOME=str(home), PATH=path, LANG="C.UTF-8"
        )
    assert ANSWER in found.printed[0]
    assert "That is all." in found.printed[0]
    masked = check_captured(found.samples, said.seen)
    if "RECORD" in os.environ:
        record(name, found, sorted(text(said, each) for each in masked))


def record(name: str, found: Captured, masked: Sequence[str]) -> None:
    """Write the shapes of the session."""
    calls = shapes(found.recorder.calls, (TASK, MORE, DOORS, WINDOWS))
    turns = sorted(len({span.turn for span in each.spans or () if span.trains}) for each in found.samples)
    write(FOLDER / f"{name}.json", calls, masked=masked, turns=turns)

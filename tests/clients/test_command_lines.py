"""Claude Code, Codex and OpenCode, unchanged and headless: `make test-clients`. `RECORD=1` writes the shapes of what they send."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.clients.command_lines import ANSWER, CLIS, DOORS, MORE, TASK, WINDOWS, model
from tests.clients.recording import recording
from tests.clients.service import (
    PROGRAMS,
    Captured,
    access_environment,
    check_captured,
    run_program,
    serving_world,
    text,
)
from tests.clients.shapes import FOLDER, shapes, write

pytestmark = pytest.mark.skipif(
    "ROLLOUT_CLIS" not in os.environ, reason="`make test-clients` installs and runs the command-line agents"
)


def session(name: str) -> list[str]:
    return ["sh", str(PROGRAMS / f"{name}.sh")]


def surroundings(folder: Path) -> dict[str, str]:
    """The environment of an agent, with a home directory of its own."""
    home = folder / "home"
    home.mkdir()
    return {"HOME": str(home), "PATH": f"{CLIS}/node_modules/.bin:{os.environ['PATH']}", "LANG": "C.UTF-8"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["claude_code", "codex", "opencode"])
async def test_a_command_line_agent_is_captured_exactly(name: str, tmp_path: Path) -> None:
    said = model(name)
    async with serving_world(said) as world:
        found = await world.capture(session(name), folder=tmp_path, **surroundings(tmp_path))
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


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["claude_code", "codex", "opencode"])
async def test_a_command_line_agent_stops_when_the_rollout_is_over(name: str, tmp_path: Path) -> None:
    async with serving_world(model(name)) as world, recording(world.endpoint) as recorder:
        uid, path, bearer = await world.start()
        await world.finish(uid, path, bearer)
        environment = access_environment(recorder.url + path, bearer["authorization"].split()[1])
        with contextlib.suppress(AssertionError):  # OpenCode exits with 0
            await run_program(session(name), environment | surroundings(tmp_path), tmp_path)
    # OpenCode asks for a title at the same time, and each session goes on to its next program or not.
    assert 1 <= len(recorder.calls) <= 4
    assert {each.status for each in recorder.calls} == {400 if name == "codex" else 410}

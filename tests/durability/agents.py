"""The agents of the crashing server: two tools that write down their side effects and can kill the server.

The environment variable DURABILITY_DIRECTORY names a directory. In its folder `effects` is one empty file per step of a tool,
because those can be created on a full disk, too. A file `strike` with "CASE TOOL MOMENT" kills the server when that tool of that
case comes to that moment, once.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rollout_server import Agent, ExternalAgent, Program, Run, tool

DIRECTORY = "DURABILITY_DIRECTORY"
MOMENTS = ("before", "middle", "after")


@tool(idempotent=True)
async def look(run: Run, case: int, step: int) -> str:
    """Look at a case."""
    return _act(run, "look", case, step)


@tool
def note(run: Run, case: int, step: int) -> str:
    """Add a note to a case."""
    return _act(run, "note", case, step)


def _act(run: Run, name: str, case: int, step: int) -> str:
    _strike(case, name, "before")
    _write(f"begun {run.uid} {case} {name} {step}")
    _strike(case, name, "middle")
    _write(f"done {run.uid} {case} {name} {step}")
    _strike(case, name, "after")
    return f"{name} {1_000_003 * case + step}"


def _directory() -> Path:
    return Path(os.environ[DIRECTORY])


def _write(step: str) -> None:
    effects = _directory() / "effects"
    effects.mkdir(exist_ok=True)
    (effects / f"{step} {secrets.token_hex(8)}").touch()


def _strike(case: int, name: str, moment: str) -> None:
    strike = _directory() / "strike"
    if strike.exists() and strike.read_text().split() == [str(case), name, moment]:
        strike.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


class Steps(Agent):
    """Run the default loop."""

    name = "steps"
    tools = (look, note)

    async def reward(self, run: Run) -> float:
        """Count the results of tools."""
        return float(sum(message["role"] == "tool" for message in run.messages))


class Replayable(Steps):
    """Run a loop of its own that repeats itself."""

    name = "replayable"
    replayable = True

    async def play(self, run: Run) -> None:
        """Record a time, a seed and the result of a function, then run the default loop."""
        began, number = run.now(), run.random().random()
        drawn = await run.once(lambda: [began.isoformat(), number])
        assert drawn == [began.isoformat(), number]
        await super().play(run)


class Unrepeatable(Steps):
    """Run a loop of its own that does not promise to repeat itself."""

    name = "unrepeatable"

    async def play(self, run: Run) -> None:
        """Run the default loop."""
        await super().play(run)


class Ranked(Steps):
    """Reward a group of four."""

    name = "ranked"

    async def reward_group(self, runs: Sequence[Run]) -> list[float]:
        """Return the indices. They are wrong if the group is not whole."""
        case = int(str(runs[0].messages[0]["content"]).split()[1].rstrip(":"))
        _act(runs[0], "reward", case, 0)
        return [4.0 - len(runs) + (run.request.group_index or 0) for run in runs]


PROGRAM = """
import json, os, urllib.request
messages = [{"role": "user", "content": "Begin."}]
for _ in range(2):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "any", "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        message = json.load(response)["choices"][0]["message"]
    messages += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": "Go on."}]
"""


class Remote(ExternalAgent):
    """Runs elsewhere."""

    name = "remote"


class RunAgain(Program):
    """A program that calls its model twice, and is run anew after a restart."""

    name = "run_again"
    command = (sys.executable, "-c", PROGRAM)
    on_restart = "again"


class RunOnce(RunAgain):
    """The same program, which ends with the server."""

    name = "run_once"
    on_restart = "end"


AGENTS = (Steps(), Replayable(), Unrepeatable(), Ranked(), Remote(), RunAgain(), RunOnce())

"""Small agents, each for one thing that a test wants to see from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from rollout_server import Agent, Run
from rollout_server.core.message import JSON


class Idle(Agent):
    """Ends at once and asks nobody."""

    name = "idle"

    async def play(self, run: Run) -> None:
        """Does nothing."""


class Gated(Agent):
    """Leaves `metadata.before` notes, waits for its gate to open, then leaves `metadata.after` notes.

    All rollouts wait at the same gate. With `metadata.sample` it samples once behind the gate.
    """

    name = "gated"

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def play(self, run: Run) -> None:
        """Notes, waits, notes."""
        self._note(run, "before")
        await self.gate.wait()
        self._note(run, "after")
        if run.metadata.get("sample"):
            await run.sample()

    def _note(self, run: Run, code: str) -> None:
        count = run.metadata.get(code, 0)
        assert isinstance(count, int)
        for number in range(count):
            run.note(code, str(number))


class Measured(Agent):
    """Leaves one note for each permit until it has left `metadata.notes`."""

    name = "measured"

    def __init__(self) -> None:
        self.permits = asyncio.Semaphore(0)

    async def play(self, run: Run) -> None:
        """Takes a permit, leaves a note, and so on."""
        notes = run.metadata["notes"]
        assert isinstance(notes, int)
        for number in range(notes):
            await self.permits.acquire()
            run.note("note", str(number))


class Quoting(Agent):
    """Says what the last message says: as a note, and as its word for the end."""

    name = "quoting"

    async def play(self, run: Run) -> None:
        """Notes or finishes, as `metadata.by` says."""
        said = str(run.messages[-1]["content"])
        if run.metadata["by"] == "note":
            run.note("quote", said)
        else:
            await run.finish(said)


class Urging(Agent):
    """Asks, urges, and asks again."""

    name = "urging"

    async def play(self, run: Run) -> None:
        """Two turns with a message of its own between."""
        await run.sample()
        await run.append({"role": "user", "content": "Really?"})
        await run.sample()


class Crumbling:
    """A tool whose description cannot be read once it is broken."""

    SECRET = "the insides of a tool"
    name = "crumbling"
    parameters_json_schema = '{"type": "object", "properties": {}, "required": []}'

    def __init__(self) -> None:
        self.broken = False

    @property
    def description(self) -> str:
        """A text, or a RuntimeError."""
        if self.broken:
            raise RuntimeError(self.SECRET)
        return "Whole."

    async def run(self, arguments: Mapping[str, JSON]) -> str:
        """Does nothing."""
        return ""


class Breaking(Idle):
    """Has a tool with a fault in it, which shows once the server runs."""

    name = "breaking"

    def __init__(self) -> None:
        self.tool = Crumbling()
        self.tools = (self.tool,)

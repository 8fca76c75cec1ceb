"""Small agents, each with one behaviour that tests observe from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from rollout_server import Agent, Run
from rollout_server.core.message import JSON


class Idle(Agent):
    """End at once, without a completion."""

    name = "idle"

    async def play(self, run: Run) -> None:
        """Return at once."""


class Gated(Agent):
    """Write `metadata.before` notes, wait for the gate to open, then write `metadata.after` notes.

    All rollouts wait at the same gate. With `metadata.sample` the agent requests one completion after the gate.
    """

    name = "gated"

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def play(self, run: Run) -> None:
        """Write notes, wait, write notes."""
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
    """Write one note per permit until there are `metadata.notes`."""

    name = "measured"

    def __init__(self) -> None:
        self.permits = asyncio.Semaphore(0)

    async def play(self, run: Run) -> None:
        """Take a permit and write a note, repeatedly."""
        notes = run.metadata["notes"]
        assert isinstance(notes, int)
        for number in range(notes):
            await self.permits.acquire()
            run.note("note", str(number))


class Quoting(Agent):
    """Repeat the last message, as a note or as the finish reason."""

    name = "quoting"

    async def play(self, run: Run) -> None:
        """Write a note or finish, depending on `metadata.by`."""
        said = str(run.messages[-1]["content"])
        if run.metadata["by"] == "note":
            run.note("quote", said)
        else:
            await run.finish(said)


class Urging(Agent):
    """Request a completion, append a user message, and request another completion."""

    name = "urging"

    async def play(self, run: Run) -> None:
        """Run two turns with a user message between them."""
        await run.sample()
        await run.append({"role": "user", "content": "Really?"})
        await run.sample()


class Crumbling:
    """A tool whose description raises once `broken` is set."""

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
        """Return an empty result."""
        return ""


class Breaking(Idle):
    """An agent with a faulty tool; the fault shows only after the server has started."""

    name = "breaking"

    def __init__(self) -> None:
        self.tool = Crumbling()
        self.tools = (self.tool,)

"""Tools with side effects that a world counts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rollout_server.core.message import JSON
from rollout_server.runtime.errors import ToolError
from rollout_server.runtime.ports import Content
from rollout_server.runtime.tools.policy import ToolPolicy
from rollout_server.runtime.tools.protocols import ToolContext, ToolDefinition, ToolRunner

from tests.simulator.faults import Fault

if TYPE_CHECKING:
    from rollout_server.runtime.run.run import Run

    from tests.simulator.world import World

_SCHEMA = '{"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}'


class CountedTool:
    """A tool that counts its executions by the key that the model passes. Each key is in one call."""

    description = "Do something."
    parameters_json_schema = _SCHEMA
    threaded = False

    def __init__(self, name: str, policy: ToolPolicy, world: World) -> None:
        self.name = name
        self.policy = policy
        self.definition = ToolDefinition(__name__, name, __file__, 1)
        self.executions: Counter[str] = Counter()
        self._world = world

    async def run(self, arguments: Mapping[str, JSON]) -> Content:
        """Run a call without a rollout: never happens in a world."""
        raise NotImplementedError

    def run_here(self, arguments: Mapping[str, JSON], context: ToolContext | None = None) -> Content:
        """Run a call in a process: never happens in a world."""
        raise NotImplementedError

    async def run_by(self, runner: ToolRunner, arguments: Mapping[str, JSON]) -> Content:
        """Run one call."""
        world, life = self._world, self._world.life
        if life.dead:
            raise ToolError("the process has crashed")
        run: Run = runner.context  # type: ignore[assignment]
        key, draw, faults, stored = str(arguments["key"]), world.draw, world.faults, world.disk.rollouts.get(run.uid)
        self.executions[key] += 1
        world.note(f"tool {self.name} {key} of {run.uid}")
        if not self.policy.idempotent:
            world.laws.require(self.executions[key] == 1, f"{self.name} ran twice for {key} of {run.uid}")
            begun = stored is not None and stored.has_started(key)
            world.laws.require(
                begun, f"{self.name} ran for {key} of {run.uid} before the start of the call was committed"
            )
        await asyncio.sleep(draw.uniform(1, 20) if faults.happens(Fault.TOOL_SLOW) else draw.uniform(0, 0.3))
        await self._use(run)
        if faults.happens(Fault.TOOL_HANGS, 0.3):
            await asyncio.get_running_loop().create_future()
        if faults.happens(Fault.TOOL_STUBBORN, 0.3):
            await stubborn(world, 12)
        if faults.happens(Fault.TOOL_FAILS):
            raise draw.choice((ToolError("no"), ValueError("no"), SystemExit(3)))
        return f"done {key}"

    async def _use(self, run: Run) -> None:
        """Use what a tool may use of its rollout."""
        match self._world.draw.randrange(12):
            case 0 | 1:
                run.now()
            case 2 | 3:
                run.give_reward(0.25)
            case 4 | 5:
                run.note("tool", "a note of a tool")
            case 6:
                await run.fork([{"role": "user", "content": "a task of a tool"}])
            case 7 if "reply" in run.state:
                run.mask(run.state["reply"], "by a tool")


def tools_of(world: World) -> tuple[CountedTool, ...]:
    """Return the tools of a world: with side effects, idempotent with retries, and one at a time on the whole server."""
    return (
        CountedTool("pay", ToolPolicy(timeout=30), world),
        CountedTool("look", ToolPolicy(idempotent=True, retries=1, timeout=8), world),
        CountedTool("build", ToolPolicy(server_concurrency=1), world),
    )


async def stubborn(world: World, seconds: float) -> None:
    """Sleep, whatever the cancellations."""
    life = world.life
    until = life.loop.time() + seconds
    while not life.dead and (left := until - life.loop.time()) > 0:
        try:
            await asyncio.sleep(left)
        except asyncio.CancelledError:
            continue

"""The agents of a world: they use every command of `Run`, alone and concurrently, and some of them misbehave.

The choices of a replayable agent depend only on the seed, the rollout's id and what it was given, so that it can run again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from rollout_server.agent import Agent
from rollout_server.core.outcome import RewardResult
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.run.messages import Reply
from rollout_server.runtime.run.run import Run

from tests.simulator.faults import Fault
from tests.simulator.tools import stubborn

if TYPE_CHECKING:
    from tests.simulator.world import World

_USER = {"role": "user", "content": "and then?"}


class SimulatedAgent(Agent):
    """An agent with the default loop, whose tools know the last completion; the base of the others."""

    name = "default loop"
    replayable = True

    def __init__(self, world: World) -> None:
        self.world = world
        self.tools = world.tools

    def draw_of(self, run: Run, part: int = 0) -> Random:
        """Return the choices of a part of a rollout: the same ones whenever it runs."""
        return Random(f"{self.world.seed} {run.rollout_id} {part}")

    def happens(self, run: Run, fault: Fault, draw: Random, rate: float) -> bool:
        """Draw a misbehaviour in a rollout, and count it."""
        if draw.random() >= rate:
            return False
        self.world.excused.add(run.uid)
        self.world.faults.count(fault)
        return True

    async def play(self, run: Run) -> None:
        while calls := (reply := await run.sample()).tool_calls:
            run.state["reply"] = reply
            await run.call(calls)

    async def reward(self, run: Run) -> float | RewardResult | None:
        draw = self.draw_of(run, 99)
        await asyncio.sleep(draw.choice((0, 0, 1)))
        if self.happens(run, Fault.AGENT_RAISES, draw, 0.03):
            raise ValueError("no reward")
        return draw.choice((None, 1.0, RewardResult(reward=0.5, scores={"a": 1.0})))


class Forking(SimulatedAgent):
    """A replayable agent with a loop of its own that uses every command."""

    name = "forking"
    replayable = True
    reward_rule = "own"

    async def play(self, run: Run) -> None:
        draw = self.draw_of(run)
        await run.append(_USER)
        for step in range(draw.randint(2, 7)):
            match draw.randrange(5):
                case 0:
                    await self._conversations(run, draw, step)
                case 1 if run.turn:
                    run = await run.fork([_USER], kind="compaction")
                case 2:
                    await run.append({"role": "user", "content": f"{run.now()} {run.random().random():.3f}"})
                case 3:
                    value = await run.once(self._side_effect)
                    run.note("once", str(value))
                case _:
                    pass
            reply = await run.sample(**({"max_tokens": 5} if draw.random() < 0.3 else {}))  # type: ignore[arg-type]
            self._judge(run, reply, draw)
            if reply.tool_calls and draw.random() < 0.8:
                await run.call(reply.tool_calls)
        if draw.random() < 0.2:
            await run.finish("enough")

    async def _conversations(self, run: Run, draw: Random, step: int) -> None:
        """Open conversations and run them at the same time."""
        kinds = [draw.random() < 0.5 for _ in range(draw.randint(1, 3))]
        runs = [await (run.fork() if branch else run.fork([_USER], role="helper")) for branch in kinds]
        works = [self._converse(each, self.draw_of(run, 10 * step + index + 1)) for index, each in enumerate(runs)]
        if draw.random() < 0.5:
            await asyncio.gather(*works)
            return
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)

    async def _converse(self, run: Run, draw: Random) -> None:
        if draw.random() < 0.3:
            run.now()
        for _ in range(draw.randint(1, 2)):
            await run.append(_USER)
            reply = await run.sample()
            self._judge(run, reply, draw)
            if reply.tool_calls:
                await run.call(reply.tool_calls)
        if draw.random() < 0.3:
            await run.once(self._side_effect)

    def _judge(self, run: Run, reply: Reply, draw: Random) -> None:
        if draw.random() < 0.2:
            run.mask(reply, "not this one")
        if draw.random() < 0.3:
            run.give_reward(draw.uniform(-1, 1))

    async def _side_effect(self) -> int:
        await asyncio.sleep(0.1)
        return self.world.next_number()


class Unruly(SimulatedAgent):
    """An agent that misbehaves, and that cannot be replayed."""

    name = "unruly"
    replayable = False

    async def play(self, run: Run) -> None:
        draw = self.draw_of(run)
        self.world.excused.add(run.uid)
        if draw.random() < 0.7:
            await self._give_up(run, draw)
        if self.happens(run, Fault.AGENT_LEAVES_TASKS, draw, 0.3):
            leftover = asyncio.create_task(self._leave(run))
            await asyncio.sleep(0.1)
            del leftover
            return
        if self.happens(run, Fault.AGENT_RAISES, draw, 0.2):
            await asyncio.sleep(draw.choice((0, 1)))
            raise draw.choice((ValueError("oh"), KeyboardInterrupt(), SystemExit(2), asyncio.CancelledError()))
        if self.happens(run, Fault.AGENT_SWALLOWS, draw, 0.4):
            await self._swallow(run, draw)
        else:
            await super().play(run)
        if self.happens(run, Fault.AGENT_STUBBORN, draw, 0.5):
            await stubborn(self.world, draw.choice((3.0, 12.0)))

    async def _leave(self, run: Run) -> None:
        fork = await run.fork([_USER])
        await fork.sample()

    async def _swallow(self, run: Run, draw: Random) -> None:
        for _ in range(6):
            try:
                reply = await run.sample()
                await run.call(reply.tool_calls)
            except BaseException:
                if self.world.life.dead:
                    raise
                await asyncio.sleep(draw.choice((0, 1)))

    async def _give_up(self, run: Run, draw: Random) -> None:
        """Cancel completions that take too long, and go on with what was closed by that."""
        reply = await run.sample()
        sub = await run.fork([_USER])
        branch = await run.fork()
        first = await branch.sample()
        other = asyncio.create_task(self._meddle(run, branch, reply))
        if draw.random() < 0.5:
            await run.sample()
        await other
        main = draw.random() < 0.4
        for each in (branch, sub, run) if main else (branch, sub):
            try:
                async with asyncio.timeout(draw.choice((0.01, 0.1))):
                    await each.attempt()
            except (TimeoutError, RolloutFailed):
                self.world.faults.count(Fault.AGENT_GIVES_UP)
        branch.now()
        branch.mask(first, "closed")
        branch.give_reward(1.0)
        later = await branch.fork(kind="branch", after=first)
        await later.fork([_USER])
        if main:
            run.note("given up", "the main conversation")
            if draw.random() < 0.5:
                await run.fork([_USER])

    async def _meddle(self, run: Run, branch: Run, reply: Reply) -> None:
        """Record what may be recorded while the conversation waits for a completion."""
        await asyncio.sleep(0.01)
        run.now()
        run.mask(reply, "meddled")
        run.give_reward(0.5)
        await run.fork([_USER])
        run.note("meddle", "during a turn")


class Tidy(SimulatedAgent):
    """An agent whose `setup` opens what its `cleanup` closes, and whose tools may be called again."""

    name = "tidy"
    replayable = True
    cleanup_seconds = 3.0

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.tools = [tool for tool in world.tools if tool.policy.idempotent]

    async def setup(self, run: Run) -> None:
        draw = self.draw_of(run, 50)
        self.world.life.sandboxes.append(run.uid)
        await asyncio.sleep(draw.choice((0, 0.5, 2)))
        run.note("setup", "done")
        if self.happens(run, Fault.AGENT_RAISES, draw, 0.1):
            raise ValueError("no sandbox")

    async def cleanup(self, run: Run) -> None:
        draw, sandboxes = self.draw_of(run, 51), self.world.life.sandboxes
        self.world.laws.require(run.uid in sandboxes, f"{run.uid}: cleanup without setup, or twice")
        sandboxes.remove(run.uid)
        await asyncio.sleep(draw.choice((0, 0.5)))
        if self.happens(run, Fault.CLEANUP_FAILS, draw, 0.2):
            await asyncio.sleep(draw.choice((0, 60)))
            raise ValueError("the sandbox is gone")


class Ranked(SimulatedAgent):
    """An agent that rewards groups."""

    name = "ranked"
    reward_group_seconds = 20.0

    async def reward_group(self, runs: Sequence[Run]) -> list[float | None]:
        draw = self.draw_of(runs[0], 60)
        await asyncio.sleep(draw.choice((0, 1, 5)))
        if self.happens(runs[0], Fault.GROUP_REWARD_FAILS, draw, 0.4):
            self.world.excused |= {run.uid for run in runs}
            await asyncio.sleep(draw.choice((0, 60)))
            raise ValueError("no ranks")
        return [draw.choice((None, float(index))) for index, _ in enumerate(runs)]


def agents_of(world: World) -> tuple[SimulatedAgent, ...]:
    """Return the agents of one process of the server."""
    return tuple(kind(world) for kind in (SimulatedAgent, Forking, Unruly, Tidy, Ranked))

"""The agents of the scenarios. `metadata` selects what they do: the name of a scenario, or "random" with a seed."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from rollout_server import Agent, Limits, RewardResult, Run, own_loop, tool

from tests.adapters.scenarios import TRUNCATED_TOKENS


@tool
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
async def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


class Scenarios(Agent):
    """Plays the scenarios. The reward is the number of turns, or that of the metadata."""

    name = "scenarios"
    tools = (add, multiply)
    limits = Limits(turns=12, calls_per_turn=8)

    async def setup(self, run: Run) -> None:
        """Fail before the first turn, if the scenario is that."""
        if run.metadata.get("scenario") == "failed_early":
            raise RuntimeError("the setup broke")

    async def play(self, run: Run) -> None:
        """Play the scenario that the metadata name."""
        name = str(run.metadata.get("scenario", ""))
        await getattr(self, f"_{name}", super().play)(run)

    async def reward(self, run: Run) -> float:
        """Return the number of turns."""
        return float(run.turn)

    async def _failed(self, run: Run) -> None:
        await run.sample()
        raise RuntimeError("the agent broke")

    async def _truncated(self, run: Run) -> None:
        await run.sample(max_tokens=TRUNCATED_TOKENS)

    async def _cancelled(self, run: Run) -> None:
        await run.sample()
        await asyncio.sleep(3600)

    async def _fork(self, run: Run) -> None:
        reply = await run.sample()
        await run.append({"role": "user", "content": "Go on."})
        branch = await run.fork(kind="branch", after=reply)
        await run.sample()
        await branch.append({"role": "user", "content": "Go back."})
        await branch.sample()

    async def _random(self, run: Run) -> None:
        chance = random.Random(f"{run.metadata.get('seed')}/{run.request.group_index}")
        lines = [run]
        for _ in range(chance.randint(1, 6)):
            line = chance.choice(lines)
            reply = await line.sample(max_tokens=chance.choice((None, None, None, 4, 12)))
            if reply.tool_calls:
                await line.call(reply.tool_calls)
            else:
                await line.append({"role": "user", "content": f"Number {chance.randrange(100)}."})
            event = chance.random()
            if event < 0.06:
                raise RuntimeError("by chance")
            if event < 0.12:
                run.mask(reply, "by chance") if line is run else None
            elif event < 0.3 and len(lines) < 4:
                lines.append(await line.fork(kind="branch"))
            elif event < 0.36:
                lines.append(await line.fork([{"role": "user", "content": f"Aside {chance.randrange(100)}."}]))


class Judged(Scenarios):
    """Gives a reward to each sample, and scores whose names a trainer may use itself."""

    name = "judged"
    reward_rule = "own"

    async def reward(self, run: Run) -> RewardResult:
        """Reward only the first conversation."""
        return RewardResult(reward=1.0, roles={"agent": 1.0}, scores={"accuracy": 0.5, "uid": 0.25, "reward": 0.125})

    async def _fork(self, run: Run) -> None:
        await run.sample()
        critic = await run.fork([{"role": "user", "content": "Scenario fork 0. Criticise it."}], role="critic")
        await critic.sample()


@own_loop(name="drifting", limits=Limits(turns=12))
async def drifting(http: Any, metadata: Any, run: Run) -> float:
    """A client with a history of its own, which it rewrites: in the scenario "drift" the system prompt, else at random."""
    chance = random.Random(f"{metadata.get('seed')}/{run.request.group_index}")
    fixed = metadata["scenario"] == "drift"
    question = f"Scenario {metadata['scenario']} {metadata['seed']}."
    history: list[dict[str, Any]] = [{"role": "system", "content": "Version 1."}, {"role": "user", "content": question}]
    calls = 2 if fixed else chance.randint(1, 6)
    for number in range(calls):
        response = await http.post("chat/completions", json={"model": "any", "messages": history})
        response.raise_for_status()
        history += [response.json()["choices"][0]["message"], {"role": "user", "content": f"Go on, {number}."}]
        event = 0.0 if fixed else chance.random()
        if event < 0.2:
            history[0] = {"role": "system", "content": f"Version {number + 2}."}
        elif event < 0.35:
            history[-2] = {"role": "assistant", "content": "I never said that."}
        elif event < 0.45:
            del history[2:-1]
        elif event < 0.5:
            raise RuntimeError("by chance")
    return float(calls)


AGENTS: tuple[Agent, ...] = (Scenarios(), Judged(), drifting)

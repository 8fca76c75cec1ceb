"""Random agents with concurrent conversations continue from any point of their log as if nothing had happened."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_server import Agent, Run, tool
from rollout_server.core.outcome import Stop

from tests.support.jumping_loop import JumpingLoop
from tests.support.replayed import Recorded
from tests.support.runtime_harness import Say, call


@tool(idempotent=True)
async def linger(seconds: float) -> float:
    """Return later."""
    await asyncio.sleep(seconds)
    return seconds


@dataclass(frozen=True)
class Act:
    """One thing that an agent does. `within` are conversations that run at the same time, each with its acts."""

    what: str
    number: int = 0
    within: tuple[tuple[Act, ...], ...] = ()


_PLAIN = ("sample", "sample", "append", "now", "random", "once", "twice", "broken", "mask", "reward", "note", "idle")
_LEAVES = st.builds(Act, st.sampled_from(_PLAIN), st.integers(0, 3))
_ACTS = st.lists(_LEAVES, max_size=3).map(tuple)
_FORKS = st.builds(
    Act, st.sampled_from(("branch", "subagent")), st.integers(0, 3), st.lists(_ACTS, min_size=1, max_size=3).map(tuple)
)
_DEEP = st.lists(_LEAVES | _FORKS, max_size=3).map(tuple)
PLANS = st.lists(
    _LEAVES
    | _FORKS
    | st.builds(Act, st.just("branch"), st.integers(0, 3), st.lists(_DEEP, min_size=1, max_size=2).map(tuple)),
    max_size=4,
).map(tuple)
SAYS = st.lists(
    st.builds(
        lambda text, seconds, tokens: Say(
            text, tuple(call("linger", f"c{n}", seconds=each) for n, each in enumerate(seconds)), tokens
        ),
        st.sampled_from(("yes", "no")),
        st.lists(st.sampled_from((0.0, 0.2, 1.0)), max_size=2),
        st.integers(1, 3),
    ),
    min_size=1,
    max_size=3,
)


class Planned(Agent):
    """Does what its plan says."""

    name = "planned"
    replayable = True
    tools = (linger,)

    def __init__(self, plan: tuple[Act, ...]) -> None:
        self.plan = plan

    async def play(self, run: Run) -> None:
        await self.act(run, self.plan)

    async def act(self, run: Run, acts: tuple[Act, ...]) -> None:
        reply: Any = None
        for act in acts:
            if act.what == "sample":
                reply = await run.sample(**({"max_tokens": act.number} if act.number else {}))
                await run.call(reply.tool_calls)
            elif act.within:
                await self.forked(run, act)
            else:
                await self.small(run, act, reply)

    async def forked(self, run: Run, act: Act) -> None:
        given = None if act.what == "branch" else [{"role": "user", "content": f"go {act.number}"}]
        forks = [await run.fork(given) for _ in act.within]
        after = [self.act(fork, acts) for fork, acts in zip(forks, act.within, strict=True)]
        await asyncio.gather(*after, self.act(run, (Act("sample"),)))

    async def small(self, run: Run, act: Act, reply: Any) -> None:
        match act.what:
            case "append":
                await run.append({"role": "user", "content": f"more {act.number}"})
            case "now":
                run.now()
            case "random":
                run.random()
            case "once":
                await run.once(lambda: later(act.number / 7, str(act.number)))
            case "twice":
                found = await asyncio.gather(*(run.once(lambda n=n: later(1 / (n + act.number), n)) for n in (1, 2, 3)))
                await run.append({"role": "user", "content": f"{found}"})
            case "broken":
                try:
                    await run.once(self.broken)
                except OSError:
                    await run.append({"role": "user", "content": "broken"})
            case "mask" if reply is not None:
                run.mask(reply, f"reason {act.number}")
            case "reward" if reply is not None:
                run.give_reward(act.number)
            case "note":
                run.note("step", str(act.number))
            case "idle":
                await asyncio.sleep(act.number / 3)

    async def broken(self) -> str:
        await asyncio.sleep(0.1)
        raise OSError

    async def reward(self, run: Run) -> float:
        return sum(run.turn_rewards.values()) + float(await run.once(lambda: later(0.1, "1")))


async def later(seconds: float, value: Any) -> Any:
    """Return a value later."""
    await asyncio.sleep(seconds)
    return value


@settings(max_examples=25, deadline=None)
@given(PLANS, SAYS, st.data())
def test_random_agents_continue_from_any_point(plan: tuple[Act, ...], says: list[Say], data: st.DataObject) -> None:
    async def run() -> None:
        recorded = Recorded(lambda: Planned(plan), *says)
        await recorded.run()
        assert recorded.outcome.end == Stop("stop")
        for _ in range(3):
            await recorded.check(data.draw(st.sampled_from(recorded.cuts)))

    loop = JumpingLoop()
    try:
        loop.run_until_complete(run())
    finally:
        loop.close()

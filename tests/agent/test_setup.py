"""`setup` and `cleanup` as plain functions, which run in threads of their own."""

from __future__ import annotations

import asyncio
import threading

from rollout_server import Agent, Run
from rollout_server.core.outcome import Cancellation, Stop
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.tools.resources import ToolLimits, ToolResources

from tests.support.runtime_harness import FOREVER, ME, RuntimeHarness, Say, outcome_of


class Threaded(Agent):
    """Note the thread of each method in `run.state`."""

    name = "threaded"

    def __init__(self) -> None:
        self.threads: list[int] = []

    def setup(self, run: Run) -> None:
        run.wait(run.append({"role": "user", "content": "Be quick."}))
        run.state["thread"] = threading.get_ident()

    def reward(self, run: Run) -> float:
        return float("thread" in run.state)

    def cleanup(self, run: Run) -> None:
        self.threads += [run.state["thread"], threading.get_ident()]


async def test_plain_functions_run_in_threads(new_world: type[RuntimeHarness]) -> None:
    agent = Threaded()
    outcome = await outcome_of(new_world(agent).start(Say("8")))
    assert (outcome.end, outcome.reward_result.reward, outcome.warnings) == (Stop("stop"), 1.0, ())
    assert [message.fields()["content"] for message in outcome.messages] == ["5 + 3?", "Be quick.", "8"]
    assert len(agent.threads) == 2
    assert threading.get_ident() not in agent.threads


async def test_a_cleanup_waits_for_no_thread_of_another_rollout(new_world: type[RuntimeHarness]) -> None:
    free = threading.Event()
    cleaned: list[str] = []

    class Busy(Agent):
        name = "busy"

        def play(self, run: Run) -> None:
            free.wait()

    class Quick(Agent):
        name = "quick"

        def cleanup(self, run: Run) -> None:
            cleaned.append(run.uid)

    world = new_world(Busy(), Quick(), tools=ToolResources(ToolLimits(threads=1)))
    try:
        busy = world.start(Say(seconds=FOREVER))
        quick = world.start(Say("8"), agent="quick")
        assert (await outcome_of(quick)).warnings == ()
        assert (cleaned, busy.outcome) == ([quick.uid], None)
    finally:
        free.set()
    await outcome_of(busy)


async def test_a_cleanup_sees_what_the_thread_of_a_cancelled_setup_opened(new_world: type[RuntimeHarness]) -> None:
    """The thread ends after the cancellation. Without the wait, nothing would close what it opens."""
    begun, free = threading.Event(), threading.Event()
    cleaned: list[object] = []

    class Opening(Agent):
        name = "opening"

        def setup(self, run: Run) -> None:
            begun.set()
            free.wait()
            run.state["opened"] = "a sandbox"

        def cleanup(self, run: Run) -> None:
            cleaned.append(run.state.get("opened"))

    world = new_world(Opening())
    rollout = world.start(Say("8"))
    await asyncio.to_thread(begun.wait)
    world.roster.cancel(Selection(ME), "not needed")
    try:
        await asyncio.sleep(0.2)
        assert cleaned == []
    finally:
        free.set()
    assert (await outcome_of(rollout)).end == Cancellation("not needed")
    assert cleaned == ["a sandbox"]

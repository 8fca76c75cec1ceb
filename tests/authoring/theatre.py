"""A real server that runs a faulty agent while a correct rollout is in progress."""

from __future__ import annotations

import asyncio
import inspect
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from rollout_server import Agent, Run, tool
from rollout_server.local_stack import FinishedRollout, LocalStack, ScriptedModel


def place(module: ModuleType, mark: str) -> str:
    """File and line of the module's line that ends with `# wrong: MARK`."""
    lines, _ = inspect.getsourcelines(module)
    (found,) = [number for number, line in enumerate(lines, start=1) if line.endswith(f"# wrong: {mark}\n")]
    return f"{module.__file__}:{found}"


@tool
async def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


class Honest(Agent):
    """A correct agent. Its first tool call waits until a test releases it."""

    name = "honest"

    def __init__(self) -> None:
        self.tools = (tool(self.wait), add)
        self.began: dict[str, threading.Event] = {}
        self.gates: dict[str, threading.Event] = {}

    async def wait(self, key: str) -> str:
        """Wait for the other rollout."""
        self.began[key].set()
        while not self.gates[key].is_set():  # noqa: ASYNC110 - the gate is opened by another thread
            await asyncio.sleep(0.005)
        return "went on"

    async def reward(self, run: Run) -> float:
        return float("8" in str(run.messages[-1]["content"]))


@dataclass(frozen=True)
class Theatre:
    """A server and its correct agent."""

    stage: LocalStack
    honest: Honest

    def play(self, agent: str, model: ScriptedModel, **fields: Any) -> FinishedRollout:
        """Run a rollout of the agent and return the result. Raises AssertionError if it affected the correct one."""
        with ThreadPoolExecutor(1) as pool:
            key = uuid.uuid4().hex
            began = self.honest.began[key] = threading.Event()
            gate = self.honest.gates[key] = threading.Event()
            beside = pool.submit(self._honest, key)
            try:
                assert began.wait(30)
                return self.stage.play("Go.", model, agent=agent, **fields)
            finally:
                gate.set()
                beside.result()

    def _honest(self, key: str) -> None:
        script = ScriptedModel().calls("wait", key=key).calls("add", a=5, b=3).says("It is 8.")
        beside = self.stage.play("Add 5 and 3.", script, agent="honest")
        assert (beside.stop, beside.failure, beside.reward) == ("stop", None, 1.0)
        assert beside.tool_results == ["went on", "8"]
        assert (len(beside.samples), list(beside.warnings)) == (1, [])

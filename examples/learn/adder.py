"""Agent with one tool. The reward is 1.0 if the model called the tool and its last message has the right number."""

import re

from rollout_server import Agent, Limits, Run, tool


@tool
async def add(a: int, b: int) -> int:
    """Add."""
    return a + b


class Adder(Agent):
    """Answers "What is 3 plus 4?" with the tool `add`. `metadata.ground_truth` is the sum."""

    name = "adder"
    tools = (add,)
    limits = Limits(turns=2)

    async def reward(self, run: Run) -> float:
        """Return 1.0 or 0.0."""
        called = any(message["role"] == "tool" for message in run.messages)
        last = run.messages[-1]
        numbers = re.findall(r"\d+", str(last.get("content"))) if last["role"] == "assistant" else []
        return float(called and numbers[-1:] == [str(run.metadata["ground_truth"])])

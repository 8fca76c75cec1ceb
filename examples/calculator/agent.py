"""Calculator agent: one tool, and a reward for the right number."""

from typing import Annotated

from rollout_server import Agent, Limits, Run, ToolError, tool

Number = int | float


@tool
def calculate(
    operation: Annotated[str, "One of + - * /"], left: Annotated[Number, "First"], right: Annotated[Number, "Second"]
) -> Number:
    """Calculate with two numbers."""
    match operation:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "/" if right != 0:
            return left / right
        case "/":
            raise ToolError("division by zero")
    raise ToolError(f"unknown operation {operation!r}; use one of + - * /")


class Calculator(Agent):
    """Solves a calculation and ends with the number after ####, as in GSM8K."""

    name = "calculator"
    tools = (calculate,)
    limits = Limits(turns=8, seconds=120)

    async def reward(self, run: Run) -> float:
        """Return 1.0 if the number after the last #### is the ground truth, else 0.0."""
        final = str(run.messages[-1].get("content")).rpartition("####")[2].strip()
        try:
            return float(float(final) == float(str(run.metadata.get("ground_truth"))))
        except ValueError:
            return 0.0

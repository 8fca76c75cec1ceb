"""An agent that owns its loop: it calls an OpenAI-compatible API over HTTP, and runs its tools itself."""

import json
from operator import add, mul, sub, truediv

from rollout_server import Limits, Rubric, own_loop

OPERATIONS = {"+": add, "-": sub, "*": mul, "/": truediv}
CALCULATE = {
    "name": "calculate",
    "description": "Calculate with two numbers.",
    "parameters": {
        "type": "object",
        "properties": {
            "operation": {"type": "string", "enum": list(OPERATIONS)},
            "left": {"type": "number"},
            "right": {"type": "number"},
        },
        "required": ["operation", "left", "right"],
    },
}
TOOLS = [{"type": "function", "function": CALCULATE}]
SYSTEM = "Use the tool for every calculation. End with #### and the number."


def calculate(arguments: str) -> str:
    """Run a call of the tool. The model gets the text of an error, too."""
    try:
        given = json.loads(arguments)
        return f"{OPERATIONS[given['operation']](given['left'], given['right']):g}"
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        return f"Error: {error!r}"


def correct(response: str, answer: str) -> float:
    """Return 1.0 if the number after the last #### is the ground truth, else 0.0."""
    return float(response.rpartition("####")[2].strip() == answer)


@own_loop(rubric=Rubric(funcs=[correct]), limits=Limits(turns=8, seconds=120))
async def solve(task, http):
    """Solves a calculation and ends with the number after ####, as in GSM8K."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
    calls = None
    while calls is None or calls:
        response = await http.post("chat/completions", json={"model": "any", "messages": messages, "tools": TOOLS})
        reply = response.raise_for_status().json()["choices"][0]["message"]
        calls = reply.get("tool_calls") or []
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": calculate(call["function"]["arguments"])}
            for call in calls
        ]
        messages += [reply, *results]

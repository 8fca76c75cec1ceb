"""Agent whose model writes a module. Hidden tests run it in the directory in which the model wrote and tried it.

The expected results never enter the directory: a module that ends its process, or reads the tests, passes none.
"""

import asyncio
import shutil
import tempfile
from operator import eq
from pathlib import Path

from limited import run_limited
from rollout_server import Agent, Limits, RewardResult, Run, ToolContext, tool

PROCESSES = 8
HIDDEN_TESTS = """results = []
for call in {calls!r}:
    try:
        import solution
        results.append(repr(eval(call, vars(solution))))
    except Exception as error:
        results.append(f"raised {{error!r}}")
print("", *results, sep="\\n")
"""


@tool
async def write_solution(code: str, context: ToolContext) -> str:
    """Write solution.py, the module that will be tested."""
    return f"wrote {(context.state['directory'] / 'solution.py').write_text(code)} characters"


@tool(concurrency=1, server_concurrency=PROCESSES)
async def run_python(code: str, context: ToolContext) -> str:
    """Run a program in the directory of solution.py, which it can import. Returns what it prints. Files are kept."""
    return await run_limited(code, context.state["directory"])


class SandboxedCode(Agent):
    """Writes a module that passes hidden tests: the ground truth is a list of pairs, a call and the `repr` of its result."""

    name, tools, limits = "sandboxed_code", (write_solution, run_python), Limits(turns=12, seconds=600)

    async def start(self) -> None:
        self.slots = asyncio.Semaphore(PROCESSES)

    async def setup(self, run: Run) -> None:
        run.state["directory"] = Path(tempfile.mkdtemp(prefix="rollout-"))

    async def reward(self, run: Run) -> RewardResult:
        calls, expected = zip(*run.metadata["ground_truth"], strict=True)
        async with self.slots:
            printed = await run_limited(HIDDEN_TESTS.format(calls=calls), run.state["directory"])
        passed = sum(map(eq, printed.splitlines()[-len(calls) :], expected))
        return RewardResult(reward=float(passed == len(calls)), scores={"passed": passed / len(calls)})

    def cleanup(self, run: Run) -> None:
        if "directory" in run.state:
            shutil.rmtree(run.state["directory"])

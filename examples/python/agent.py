"""Agent that runs the model's Python code in a separate process, with limits on time, memory, files, processes and output.

The limits protect the server from mistakes, but not from malicious code: the process can read all files that the server's user
can read, and it has network access. Run the server in a container, or call a sandbox from `run_python`.
"""

import tempfile

from limited import run_limited
from rollout_server import Agent, Limits, Run, tool


@tool(server_concurrency=8)
async def run_python(code: str) -> str:
    """Run Python code and return what it prints, its errors included.

    Args:
        code: a whole program. Nothing is kept between calls.
    """
    with tempfile.TemporaryDirectory() as directory:
        return await run_limited(code, directory)


class Python(Agent):
    """Solves problems by writing Python."""

    name = "python"
    tools = (run_python,)
    limits = Limits(turns=8, seconds=300)

    async def reward(self, run: Run) -> float:
        """Return 1.0 if the text after the last #### is the ground truth, else 0.0."""
        final = str(run.messages[-1].get("content")).rpartition("####")[2].strip()
        return float(final == str(run.metadata.get("ground_truth")))

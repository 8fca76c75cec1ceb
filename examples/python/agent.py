"""Agent that runs the model's Python code in a separate process, with limits on time, memory and files.

The limits protect the server from mistakes, but not from malicious code: the process can read all files that the server's user
can read, and it has network access. Run the server in a container, or call a sandbox from `run_python`.
"""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from pathlib import Path

from rollout_server import Agent, Limits, Run, tool

LIMITED = Path(__file__).with_name("limited.py")
CPU_SECONDS, SECONDS, CHARACTERS = 5, 10, 4000


@tool
async def run_python(code: str) -> str:
    """Run Python code and return what it prints, its errors included.

    Args:
        code: a whole program. Nothing is kept between calls.
    """
    with tempfile.TemporaryDirectory() as directory:
        running = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", LIMITED, str(CPU_SECONDS)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=directory,
            env={"PATH": os.defpath, "LANG": "C.UTF-8"},  # none of the server's secrets
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(SECONDS):
                return described(running, await output_of(running, code))
        except TimeoutError:
            return f"stopped after {SECONDS} seconds"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)  # with all processes that it started
            await running.wait()


async def output_of(running: asyncio.subprocess.Process, code: str) -> str:
    """Return the beginning of the program's output. The rest is read and discarded, so that a flood needs no memory."""
    assert running.stdin is not None
    assert running.stdout is not None
    # A program that fails at once closes its standard input before it has read the code.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        running.stdin.write(code.encode())
        await running.stdin.drain()
    running.stdin.close()
    kept, size = b"", 0
    while chunk := await running.stdout.read(65536):
        kept, size = (kept + chunk)[: 4 * CHARACTERS], size + len(chunk)
    await running.wait()
    text = kept.decode(errors="replace")
    cut = size > len(kept) or len(text) > CHARACTERS
    return f"{text[:CHARACTERS]}\n... cut: {size} bytes were printed" if cut else text


def described(running: asyncio.subprocess.Process, text: str) -> str:
    """Return the tool result for the model: the output, or why there is none."""
    code = running.returncode or 0
    if code < 0:
        return f"{text}\nended by {signal.Signals(-code).name}: too much time or memory"
    return text or "(nothing was printed)"


class Python(Agent):
    """Solves problems by writing Python."""

    name = "python"
    tools = (run_python,)
    limits = Limits(turns=8, seconds=300)

    async def reward(self, run: Run) -> float:
        """Return 1.0 if the text after the last #### is the ground truth, else 0.0."""
        final = str(run.messages[-1].get("content")).rpartition("####")[2].strip()
        return float(final == str(run.metadata.get("ground_truth")))

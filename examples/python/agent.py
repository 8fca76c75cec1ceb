"""Runs the model's Python code in a process of its own, with limits on time, memory and files.

The limits keep a mistake from harming the server. They are no wall against code that means harm: the process may read what the
server's user may read, and it has the network. Put the server into a container, or call a sandbox from `run_python`.
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
                return told(running, await printed(running, code))
        except TimeoutError:
            return f"stopped after {SECONDS} seconds"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)  # and whatever it has started
            await running.wait()


async def printed(running: asyncio.subprocess.Process, code: str) -> str:
    """The beginning of what the program prints. The rest is read and thrown away, so that a flood takes no memory."""
    assert running.stdin is not None
    assert running.stdout is not None
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


def told(running: asyncio.subprocess.Process, text: str) -> str:
    """What the model reads."""
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
        """1.0 if the text after the last #### is the ground truth."""
        said = str(run.messages[-1].get("content")).rpartition("####")[2].strip()
        return float(said == str(run.metadata.get("ground_truth")))

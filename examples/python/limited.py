"""Run Python code in a separate process with limits on time, memory, files, processes and output. This is not a sandbox.

`run_limited` starts this file as a program: `limited.py CPU_SECONDS`. It sets the limits of its process, and then executes
the code from its standard input.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from pathlib import Path

CPU_SECONDS, SECONDS, CHARACTERS = 5, 10, 4000
MEMORY, FILE = 512 * 1024 * 1024, 1024 * 1024
STARTS_PROCESS = {"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec", "subprocess.Popen"}


async def run_limited(code: str, directory: str | Path) -> str:
    """Run a program in a directory. Return the beginning of its output, errors included, or why there is none."""
    import asyncio  # takes longer than the whole start of the program, which does not need it

    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-IB", __file__, str(CPU_SECONDS)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=directory,
        # None of the server's secrets, and no threads for linear algebra: the limit of processes counts threads.
        env={"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(SECONDS):
            return _described(running, await _output_of(running, code))
    except TimeoutError:
        return f"stopped after {SECONDS} seconds"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)  # with all processes that it started
        await running.wait()


async def _output_of(running: asyncio.subprocess.Process, code: str) -> str:
    """Return the beginning of the program's output. The rest is read and discarded, so that a flood needs no memory."""
    assert running.stdin is not None
    assert running.stdout is not None
    # A program that fails at once closes its standard input before it has read the code.
    with suppress(BrokenPipeError, ConnectionResetError):
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


def _described(running: asyncio.subprocess.Process, text: str) -> str:
    """Return the output for the model, with the reason if a limit ended the program."""
    code = running.returncode or 0
    if code < 0:
        return f"{text}\nended by {signal.Signals(-code).name}: too much time or memory"
    return text or "(nothing was printed)"


def _refuse_processes(event: str, _: object) -> None:
    if event in STARTS_PROCESS:
        raise PermissionError("a program may not start processes")


def _main() -> None:
    program = compile(sys.stdin.read(), "<program>", "exec")
    for limit, amount in (
        (resource.RLIMIT_CPU, int(sys.argv[1])),
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, FILE),
        (resource.RLIMIT_NPROC, 0),  # the kernel does not enforce it for root; the hook below is for root, too
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (amount, amount))
    sys.addaudithook(_refuse_processes)
    sys.path.insert(0, os.getcwd())  # modules that earlier programs wrote
    exec(program, {"__name__": "__main__"})


if __name__ == "__main__":
    _main()

"""Fork processes of `rollout` whose modules are imported already: a server is ready in a fraction of a second, with little CPU.

Run as a program, it is the process that forks. In every other respect the forked processes are those of `python -m`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND = "rollout_server.cli"
PR_SET_PDEATHSIG = 1
MODULES = (
    "rollout_gateway.app",
    "rollout_server.app",
    "rollout_server.assembly",
    "rollout_server.authoring.agent_loader",
    "rollout_server.cli.commands",
    "rollout_server.cli.operate.serve",
    "rollout_server.edge.journal.journal",
    "rollout_server.embedded_gateway",
    "rollout_server.serving",
    "rollout_server.tool_server.server",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_fast",
)
_LONGEST_JOB = 1 << 20


class Forked:
    """A forked process, with the part of the interface of `asyncio.subprocess.Process` that tests use."""

    def __init__(
        self, pid: int, stderr: asyncio.StreamReader, status: asyncio.StreamReader, stdout: asyncio.StreamReader | None
    ) -> None:
        self.pid = pid
        self.stderr = stderr
        self.stdout = stdout
        self.returncode: int | None = None
        self._ending = asyncio.create_task(self._ended(status))

    async def wait(self) -> int:
        """Wait for the exit and return the exit code: -N if signal N ended it."""
        return await asyncio.shield(self._ending)

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    async def _ended(self, status: asyncio.StreamReader) -> int:
        self.returncode = int(await status.read())
        return self.returncode


class Forker:
    """The process that forks, from the first use until the end of this process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                (sys.executable, "-m", __name__, str(theirs.fileno())),
                cwd=REPOSITORY,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    async def fork(
        self, *arguments: str, cwd: Path, env: Mapping[str, str], module: str = COMMAND, has_stdout: bool = False
    ) -> Forked:
        """Fork `python -m MODULE ARGUMENTS`; by default `rollout ARGUMENTS`.

        Its stdin is empty. Its stdout is a pipe with `has_stdout`; otherwise that of this process for a command, and its stderr
        for another module.
        """
        job = json.dumps({"module": module, "arguments": arguments, "directory": str(cwd), "environment": dict(env)})
        pipes = [os.pipe() for _ in range(3 if has_stdout else 2)]
        pid = await asyncio.to_thread(self._request, job, [write for _, write in pipes])
        for _, write in pipes:
            os.close(write)
        stderr, status, *stdout = [await _reader(read) for read, _ in pipes]
        return Forked(pid, stderr, status, stdout[0] if stdout else None)

    def _request(self, job: str, descriptors: Sequence[int]) -> int:
        with self._lock:
            socket.send_fds(self._socket, [job.encode()], descriptors)
            return int(self._socket.recv(64))


@cache
def forker() -> Forker:
    """The forker of this process."""
    return Forker()


async def _reader(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    pipe = os.fdopen(descriptor, "rb", 0)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader


def _next_job(requests: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each job and report exit codes, until the caller has gone. In a forked process, return its job."""
    statuses: dict[int, int] = {}
    wakeup, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        selector.register(wakeup, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if wakeup in ready:
                os.read(wakeup, 4096)
                _report_exits(statuses)
            if requests.fileno() not in ready:
                continue
            data, descriptors, _, _ = socket.recv_fds(requests, _LONGEST_JOB, 3)
            if not data:
                return None
            stderr, status, *stdout = descriptors
            pid = os.fork()
            if pid == 0:
                os.dup2(stderr, 2)
                for each in stdout:
                    os.dup2(each, 1)
                for each in (stderr, status, *stdout, wakeup, wake, *statuses.values()):
                    os.close(each)
                return dict(json.loads(data))
            statuses[pid] = status
            for each in (stderr, *stdout):
                os.close(each)
            requests.send(str(pid).encode())


def _report_exits(statuses: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            status = statuses.pop(found[0])
            os.write(status, str(os.waitstatus_to_exitcode(found[1])).encode())
            os.close(status)


def _run(module: str, arguments: Sequence[str], directory: str, environment: Mapping[str, str]) -> None:
    if sys.platform == "linux":  # a test run that is killed leaves no servers behind
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    # The forker's stdout may be a file, and its buffer would seek in the pipe.
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.path[0] = directory
    sys.argv = [module, *arguments]
    if module != COMMAND:
        os.dup2(2, 1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _serve(requests: socket.socket) -> None:
    for module in MODULES:
        import_module(module)
    gc.freeze()
    job = _next_job(requests)
    requests.close()
    if job is not None:
        _run(**job)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))

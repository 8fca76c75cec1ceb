"""The command line, as separate processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tests.support.forking import Forked, forker

COMMAND = (sys.executable, "-m", "rollout_server.cli")
ANY_PORTS = ("--host", "127.0.0.1", "--http-port", "0", "--grpc-port", "0", "--tokenizer", "toy=toy")
_SERVING = re.compile(r"serving gRPC on port (\d+)(?:, HTTP on port (\d+))?")
_OURS = ("ROLLOUT_", "OSMOSIS_", "TOKENIZER_", "HTTP_CLIENT_", "MAX_CONCURRENT_", "MOCK_")


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without the variables that the command line reads, plus the changes."""
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(_OURS)}
    return {**kept, "NO_COLOR": "1", "COLUMNS": "200", **changes}


@dataclass(frozen=True)
class Finished:
    """The exit code and output of a command."""

    code: int
    out: str
    err: str


async def command(*arguments: str, cwd: Path, env: Mapping[str, str] | None = None) -> Finished:
    """Run `rollout ARGUMENTS` until it exits."""
    process = await _begun(arguments, cwd, env or environment())
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        out, err = await asyncio.gather(process.stdout.read(), process.stderr.read())
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
    return Finished(code, out.decode(), err.decode())


async def _begun(arguments: Sequence[str], cwd: Path, env: Mapping[str, str]) -> asyncio.subprocess.Process | Forked:
    """A forked process, or a new one if the environment changes what Python itself reads at its start."""
    if all(os.environ.get(name) == value for name, value in env.items() if name.startswith("PYTHON")):
        return await forker().fork(*arguments, cwd=cwd, env=env, has_stdout=True)
    return await asyncio.create_subprocess_exec(
        *COMMAND,
        *arguments,
        cwd=cwd,
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@dataclass
class Logged:
    """A running process, and its log so far."""

    process: asyncio.subprocess.Process | Forked
    log: list[str] = field(default_factory=list)
    _reading: asyncio.Task[None] | None = None

    @property
    def text(self) -> str:
        """The log so far."""
        return "".join(self.log)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    async def logged(self, text: str) -> None:
        """Wait for a text in the log."""
        while text not in self.text:
            assert self._reading is not None
            assert not self._reading.done(), self.text
            await asyncio.sleep(0.01)

    async def ended(self) -> int:
        """Wait for the exit and return the exit code. The log is complete then."""
        code = await self.process.wait()
        if self._reading is not None:
            await self._reading
        return code

    async def start(self) -> None:
        """Start reading the log. A subclass also waits until the process is ready."""
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.log.append(line.decode())


@dataclass
class Serving(Logged):
    """A running `rollout serve`."""

    grpc_port: int = 0
    http_port: int = 0

    @property
    def url(self) -> str:
        """Base URL of the HTTP port."""
        return f"http://127.0.0.1:{self.http_port}"

    async def start(self) -> None:
        """Wait until it serves."""
        await super().start()
        await self.logged("serving gRPC on port ")
        found = _SERVING.search(self.text)
        assert found is not None, self.text
        self.grpc_port, self.http_port = int(found[1]), int(found[2] or 0)


Running = TypeVar("Running", bound=Logged)


@contextlib.asynccontextmanager
async def started(kind: type[Running], *arguments: str, cwd: Path, env: Mapping[str, str]) -> AsyncIterator[Running]:
    """Run `rollout ARGUMENTS` and yield once it is ready. The process is killed at the end of the block if it still runs."""
    process = await forker().fork(*arguments, cwd=cwd, env=env)
    running = kind(process)
    try:
        await running.start()
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await running.ended()


@contextlib.asynccontextmanager
async def serve(*arguments: str, cwd: Path, **env: str) -> AsyncIterator[Serving]:
    """Run `rollout serve` on free ports."""
    clean = environment(ROLLOUT_TOKENIZERS_OFFLINE="true", **env)
    async with started(Serving, "serve", *ANY_PORTS, *arguments, cwd=cwd, env=clean) as serving:
        yield serving

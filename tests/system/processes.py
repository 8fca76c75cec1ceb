"""The command line as processes of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

COMMAND = (sys.executable, "-m", "rollout_server.cli")
ANY_PORTS = ("--host", "127.0.0.1", "--http-port", "0", "--grpc-port", "0", "--tokenizer", "toy=toy")
_SERVING = re.compile(r"serving gRPC on port (\d+)(?:, HTTP on port (\d+))?")
_OURS = ("ROLLOUT_", "OSMOSIS_", "TOKENIZER_", "HTTP_CLIENT_", "MAX_CONCURRENT_", "MOCK_")


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without what the command line reads, and with the changes."""
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(_OURS)}
    return {**kept, "NO_COLOR": "1", "COLUMNS": "200", **changes}


@dataclass(frozen=True)
class Finished:
    """A command that has come to its end."""

    code: int
    out: str
    err: str


async def command(*arguments: str, cwd: Path, env: Mapping[str, str] | None = None) -> Finished:
    """Runs `rollout ARGUMENTS` to its end."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *arguments,
        cwd=cwd,
        env=env or environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return Finished(process.returncode, out.decode(), err.decode())


@dataclass
class Serving:
    """A `rollout serve` that serves, and its log so far."""

    process: asyncio.subprocess.Process
    log: list[str] = field(default_factory=list)
    grpc_port: int = 0
    http_port: int = 0
    _reading: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where HTTP is served."""
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def text(self) -> str:
        """The whole log so far."""
        return "".join(self.log)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self.process.send_signal(number)

    async def ended(self) -> int:
        """Waits for the end; returns the exit code. The log is whole then."""
        code = await self.process.wait()
        if self._reading is not None:
            await self._reading
        return code

    async def start(self) -> None:
        """Waits until it serves."""
        ready = asyncio.Event()
        self._reading = asyncio.create_task(self._read(ready))
        await ready.wait()
        assert self.grpc_port, self.text

    async def _read(self, ready: asyncio.Event) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.log.append(line.decode())
            if found := _SERVING.search(self.log[-1]):
                self.grpc_port, self.http_port = int(found[1]), int(found[2] or 0)
                ready.set()
        ready.set()


@contextlib.asynccontextmanager
async def serve(*arguments: str, cwd: Path, **env: str) -> AsyncIterator[Serving]:
    """`rollout serve` on ports of its own choice; ended with the block, if the test has not."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        "serve",
        *ANY_PORTS,
        *arguments,
        cwd=cwd,
        env=environment(ROLLOUT_TOKENIZERS_OFFLINE="true", **env),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    serving = Serving(process)
    try:
        await serving.start()
        yield serving
    finally:
        if process.returncode is None:
            process.kill()
        await serving.ended()

"""`rollout gateway` as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.system.processes import COMMAND, environment

_LISTENING = re.compile(r"gateway on (https?)://127\.0\.0\.1:(\d+), before (.*)")


@dataclass
class Alone:
    """A gateway that listens, and its log so far."""

    process: asyncio.subprocess.Process
    log: list[str] = field(default_factory=list)
    scheme: str = ""
    port: int = 0
    before: str = ""
    _reading: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"{self.scheme}://localhost:{self.port}"

    @property
    def text(self) -> str:
        """The whole log so far."""
        return "".join(self.log)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self.process.send_signal(number)

    async def logged(self, text: str) -> None:
        """Waits for a line of the log."""
        while text not in self.text:
            assert self._reading is not None
            assert not self._reading.done(), self.text
            await asyncio.sleep(0.01)

    async def ended(self) -> int:
        """Waits for the end; returns the exit code. The log is whole then."""
        code = await self.process.wait()
        if self._reading is not None:
            await self._reading
        return code

    async def start(self) -> None:
        """Waits until it listens."""
        self._reading = asyncio.create_task(self._read())
        await self.logged("gateway on ")
        found = _LISTENING.search(self.text)
        assert found is not None, self.text
        self.scheme, self.port, self.before = found[1], int(found[2]), found[3]

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.log.append(line.decode())


@contextlib.asynccontextmanager
async def alone(*arguments: str, cwd: Path, **env: str) -> AsyncIterator[Alone]:
    """`rollout gateway` on a port of its own choice; ended with the block, if the test has not."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        "gateway",
        *("--host", "127.0.0.1", "--port", "0"),
        *arguments,
        cwd=cwd,
        env=environment(**env),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    gateway = Alone(process)
    try:
        await gateway.start()
        yield gateway
    finally:
        if process.returncode is None:
            process.kill()
        await gateway.ended()

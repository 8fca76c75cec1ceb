"""`rollout gateway` as a separate process."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import Logged, environment, started

_LISTENING = re.compile(r"gateway serves (https?)://127\.0\.0\.1:(\d+) for (.*)")


@dataclass
class Alone(Logged):
    """A gateway that listens."""

    scheme: str = ""
    port: int = 0
    before: str = ""

    @property
    def url(self) -> str:
        """Base URL of the gateway."""
        return f"{self.scheme}://localhost:{self.port}"

    async def start(self) -> None:
        """Wait until it listens."""
        await super().start()
        await self.logged("gateway serves ")
        found = _LISTENING.search(self.text)
        assert found is not None, self.text
        self.scheme, self.port, self.before = found[1], int(found[2]), found[3]


@contextlib.asynccontextmanager
async def alone(*arguments: str, cwd: Path, **env: str) -> AsyncIterator[Alone]:
    """Run `rollout gateway` on a free port."""
    ports = ("--host", "127.0.0.1", "--port", "0")
    async with started(Alone, "gateway", *ports, *arguments, cwd=cwd, env=environment(**env)) as gateway:
        yield gateway

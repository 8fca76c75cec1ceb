"""A fresh server process to attack. Measures its memory and the latency of `/healthz` during an attack."""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.support.processes import Serving, serve

KEY = "key-of-the-attacked-0123456789"
NOWHERE = "http://127.0.0.1:9"
"""An address where no trainer listens."""


@dataclass
class Target:
    """A separate server process that requires keys."""

    serving: Serving
    client: httpx.AsyncClient = field(repr=False)
    headers: dict[str, str] = field(default_factory=lambda: {"authorization": f"Bearer {KEY}"})

    @property
    def url(self) -> str:
        """Base URL of the HTTP port."""
        return self.serving.url

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The key as gRPC metadata."""
        return tuple(self.headers.items())

    async def post(self, path: str, content: bytes, *, key: bool = True, **headers: str) -> httpx.Response:
        """Send a body, with the right key or without one."""
        sent = {"content-type": "application/json", **(self.headers if key else {}), **headers}
        return await self.client.post(path, content=content, headers=sent)

    def memory(self, name: str = "VmRSS") -> int:
        """Current (VmRSS) or maximum (VmHWM) memory of the process, in bytes."""
        status = Path(f"/proc/{self.serving.process.pid}/status").read_text(encoding="ascii")
        found = re.search(rf"{name}:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024

    def faults(self) -> list[str]:
        """What no input may cause: errors and tracebacks in the log, and the exit of the process."""
        found = [line for line in self.serving.log if " ERROR " in line or "Traceback" in line]
        if self.serving.process.returncode is not None:
            found.append(f"the server ended with {self.serving.process.returncode}")
        return found

    async def healthy(self) -> bool:
        """Whether it still responds and accepts rollouts."""
        alive = await self.client.get("/healthz")
        ready = await self.client.get("/readyz")
        return alive.status_code == ready.status_code == 200


@asynccontextmanager
async def target(**settings: str) -> AsyncIterator[Target]:
    """A fresh server; `settings` are environment variables."""
    env: dict[str, Any] = {"ROLLOUT_API_KEY": KEY, "ROLLOUT_DRAIN_SECONDS": "0", "ROLLOUT_RETRIES": "0", **settings}
    with tempfile.TemporaryDirectory(prefix="hostile") as folder:
        async with (
            serve(cwd=Path(folder), **env) as serving,
            httpx.AsyncClient(
                base_url=serving.url, timeout=300, trust_env=False, limits=httpx.Limits(max_connections=None)
            ) as client,
        ):
            yield Target(serving, client)


class Pulse:
    """Poll `/healthz` in a separate process. `worst` is the longest latency in seconds, set at the end."""

    def __init__(self, port: int) -> None:
        self.worst = 0.0
        self.count = 0
        self._port = port

    async def __aenter__(self) -> Pulse:
        command = (sys.executable, str(Path(__file__).with_name("pulse.py")), str(self._port))
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert self._process.stdout is not None
        await self._process.stdout.readline()
        return self

    async def __aexit__(self, *_: object) -> None:
        out, _err = await self._process.communicate(b"")
        worst, count = out.split()
        self.worst, self.count = float(worst), int(count)

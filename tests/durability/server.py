"""`rollout serve` on one journal directory and fixed ports: started, killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from osmosis.rollout.v1 import rollout_service_pb2_grpc

from bench.programs.child import free_port
from tests.durability.agents import AGENTS, DIRECTORY
from tests.support.processes import environment
from tests.support.server_client import CHANNEL_OPTIONS

REPOSITORY = Path(__file__).resolve().parents[2]
_LEVEL = re.compile(r" (INFO|WARNING|ERROR) ")
SERVED = [f"tests.durability.agents:{type(agent).__name__}" for agent in AGENTS]


class Forker:
    """The process that forks servers, from the first use until `close`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-m", "tests.durability.forking"),
            cwd=REPOSITORY,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read() == "ready"

    def fork(self, job: Mapping[str, Any]) -> int:
        """Fork a process of the command line and return its id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return int(self._read())

    def close(self) -> None:
        """End the process. The servers are not its business."""
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@dataclass
class JournaledServer:
    """The server of a test. `variables` are further environment variables, for its next start."""

    forker: Forker
    directory: Path
    variables: dict[str, str] = field(default_factory=dict)
    grpc_port: int = field(default_factory=free_port)
    http_port: int = field(default_factory=free_port)
    process: int = 0
    starts: int = 0
    channel: Any = None

    @property
    def journal(self) -> Path:
        """The journal's directory."""
        return self.directory / "journal"

    @property
    def url(self) -> str:
        """Base URL of the HTTP port."""
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def stub(self) -> Any:
        """A stub of the service, on a channel of the current process."""
        return rollout_service_pb2_grpc.RolloutServiceStub(self.channel)

    @property
    def log(self) -> str:
        """What the current process logged."""
        file = self.directory / f"log-{self.starts}"
        return file.read_text() if file.exists() else ""

    def problems(self) -> str:
        """What all processes logged as warnings and errors, with their tracebacks, and the start of each process."""
        lines = []
        for number in range(1, self.starts + 1):
            lines.append(f"--- process {number}")
            is_shown = False
            for line in (self.directory / f"log-{number}").read_text().splitlines():
                if _LEVEL.search(line):
                    is_shown = " INFO " not in line
                lines += [line] if is_shown else []
        return "\n".join(lines)

    def received(self) -> Set[str]:
        """The uids of the rollouts whose outcome was acknowledged, as the journal has them."""
        with closing(sqlite3.connect(self.journal / "journal.sqlite3")) as connection:
            return {uid for (uid,) in connection.execute("SELECT uid FROM rollouts WHERE received")}

    @property
    def arguments(self) -> Sequence[str]:
        """The arguments of `rollout`."""
        ports = ("--grpc-port", str(self.grpc_port), "--http-port", str(self.http_port))
        return ("serve", "--host", "127.0.0.1", *ports, "--tokenizer", "toy=toy", *SERVED)

    def environment(self) -> dict[str, str]:
        """The environment of the process. Pauses between attempts are short."""
        chosen = {
            "ROLLOUT_JOURNAL": str(self.journal),
            "ROLLOUT_TOKENIZERS_OFFLINE": "true",
            "ROLLOUT_RETRY_BASE_SECONDS": "0.05",
            "ROLLOUT_RETRY_MAX_SECONDS": "0.2",
            "ROLLOUT_MAX_RUNNING": "64",
            "ROLLOUT_DRAIN_SECONDS": "0",
            "PYTHONPATH": str(REPOSITORY),
            DIRECTORY: str(self.directory),
        }
        return environment(**{**chosen, **self.variables})

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return False
        return True

    def launch(self) -> None:
        """Start a process without waiting until it serves."""
        self.starts += 1
        job = {
            "arguments": self.arguments,
            "environment": self.environment(),
            "directory": str(self.directory),
            "log": str(self.directory / f"log-{self.starts}"),
        }
        self.process = self.forker.fork(job)

    async def start(self) -> None:
        """Start a process and wait until it serves."""
        self.launch()
        while "serving gRPC on port" not in self.log:
            assert self.is_alive, self.log
            await asyncio.sleep(0.01)
        await self.connect()

    async def connect(self) -> None:
        """Open a channel to the current process."""
        if self.channel is not None:
            await self.channel.close()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.grpc_port}", options=CHANNEL_OPTIONS)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it still runs. May be called in any thread."""
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process, number)

    def kill(self) -> None:
        """Kill the process at once. May be called in any thread."""
        self.send(signal.SIGKILL)

    async def ended(self) -> None:
        """Wait until the process has ended."""
        while self.is_alive:  # noqa: ASYNC110 - it is not a child of this process
            await asyncio.sleep(0.005)

    async def restart(self) -> None:
        """Wait until the process has ended, and start the next one on the same directory and ports."""
        await self.ended()
        await self.start()

    async def stop(self) -> None:
        """Kill the process and close the channel."""
        self.kill()
        await self.ended()
        if self.channel is not None:
            await self.channel.close()


@asynccontextmanager
async def journaled_server(forker: Forker, directory: Path, **variables: str) -> AsyncIterator[JournaledServer]:
    """Serve until the block ends."""
    server = JournaledServer(forker, directory, dict(variables))
    try:
        await server.start()
        yield server
    finally:
        await server.stop()
        sys.stdout.write(server.problems())  # pytest shows it if the test fails

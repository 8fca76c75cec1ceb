"""The running programs of a benchmark: servers, trainer and floor."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import aiohttp
import grpc
import msgspec

from bench.judge.workload import IN_MEMORY, Plan
from bench.programs.child import Child, Cores, Program, free_port, running
from bench.programs.drive import TOKENIZER

_T = TypeVar("_T")
_ROOT = Path(__file__).parents[2]
_KEEPALIVE_SECONDS = 2.0
"""Shorter than the server's idle timeout, because a request on a connection that is being closed is lost."""
_AGENTS_FILE = _ROOT / "bench" / "programs" / "agents.py"
_AGENTS = ("rollout_server.calculator:Calculator", f"{_AGENTS_FILE}:OwnLoop", f"{_AGENTS_FILE}:Verbose")
_PREFIXES = ("ROLLOUT_", "OSMOSIS_", "TOKENIZER_")
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0)]


@dataclass(frozen=True, slots=True)
class Running:
    """A running server, trainer or floor: its process, the URL of its HTTP API, its gRPC port and a channel to it."""

    child: Child
    url: str
    grpc_port: int
    channel: grpc.aio.Channel


@dataclass(frozen=True, slots=True)
class Bench:
    """How to start programs: which tokenizer, on which cores, for how many rollouts at once, and with which settings."""

    plan: Plan
    tokenizer: Path
    cores: Cores
    base: Path | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    @asynccontextmanager
    async def server(self, journal: str, clone: Path | None = None) -> AsyncIterator[Running]:
        """Run a server in an empty directory, so that no `.env` changes its settings. `clone`: the source of another one."""
        with tempfile.TemporaryDirectory(prefix="bench-") as directory:
            program, grpc_port = server_program(self.plan, self.tokenizer, self.cores, Path(directory), journal)
            program.environment.update(self.settings)
            if clone is not None:
                paths = (str(clone / name) for name in ("server", "gateway", "generated"))
                program.environment["PYTHONPATH"] = ":".join(paths)
            async with _connected(program, grpc_port) as found:
                yield found

    @asynccontextmanager
    async def trainer(self, tools_from: str) -> AsyncIterator[Running]:
        """Run the trainer."""
        program, grpc_port = trainer_program(self.plan, self.tokenizer, self.cores, tools_from)
        async with _connected(program, grpc_port) as found:
            yield found

    @asynccontextmanager
    async def floor(self, trainer: str) -> AsyncIterator[Running]:
        """Run the floors, which are one process."""
        port, grpc_port = free_port(), free_port()
        command = [sys.executable, "-m", "bench.programs.floor", str(port), str(grpc_port), trainer]
        url = f"http://127.0.0.1:{port}"
        program = Program("the floor", command, url, self.cores.measured, dict(os.environ), _ROOT)
        async with _connected(program, grpc_port) as found:
            yield found


@asynccontextmanager
async def _connected(program: Program, grpc_port: int) -> AsyncIterator[Running]:
    async with (
        running(program) as child,
        grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}", options=_OPTIONS) as channel,
    ):
        yield Running(child, program.url, grpc_port, channel)


@dataclass(frozen=True, slots=True)
class Site:
    """All running programs. `servers`: by journal; those of another clone by "base"."""

    servers: dict[str, Running]
    trainer: Running
    floor: Running
    http: aiohttp.ClientSession


@asynccontextmanager
async def site(bench: Bench, journals: Sequence[str]) -> AsyncIterator[Site]:
    """Run servers with these journals, the trainer and the floor."""
    async with AsyncExitStack() as stack:
        servers = {journal: await stack.enter_async_context(bench.server(journal)) for journal in journals}
        first = next(iter(servers))
        if bench.base is not None:
            servers["base"] = await stack.enter_async_context(bench.server(first, bench.base))
        trainer = await stack.enter_async_context(bench.trainer(servers[first].url))
        floor = await stack.enter_async_context(bench.floor(trainer.url))
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS)
        session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300))
        yield Site(servers, trainer, floor, await stack.enter_async_context(session))


def server_program(
    plan: Plan, tokenizer: Path, cores: Cores, directory: Path, journal: str = IN_MEMORY
) -> tuple[Program, int]:
    """Return the server under test and its gRPC port. It runs in `directory`, which also holds its journal if that is on disk."""
    http_port, grpc_port = free_port(), free_port()
    command = [sys.executable, "-m", "rollout_server.cli", "serve", *_AGENTS, "--host", "127.0.0.1"]
    command += ["--http-port", str(http_port), "--grpc-port", str(grpc_port)]
    command += ["--tokenizer", f"{TOKENIZER}={tokenizer.resolve()}"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_PREFIXES)}
    environment = inherited | {
        "ROLLOUT_LOG_LEVEL": "warning",
        "ROLLOUT_JOURNAL": IN_MEMORY if journal == IN_MEMORY else str(directory / "journal"),
        "MAX_CONCURRENT_ROLLOUTS": str(2 * plan.concurrency),
    }
    url = f"http://127.0.0.1:{http_port}"
    return Program("the server", command, url, cores.measured, environment, directory), grpc_port


def trainer_program(plan: Plan, tokenizer: Path, cores: Cores, gateway: str) -> tuple[Program, int]:
    """Return the trainer, which fetches the tools from a gateway, and its gRPC port."""
    port, grpc_port = free_port(), free_port()
    command = [sys.executable, "-m", "bench.programs.trainer", str(port), "--tokenizer", str(tokenizer.resolve())]
    command += ["--tools-from", gateway, "--grpc-port", str(grpc_port)]
    for name in dict.fromkeys(workload.conversation for workload in plan.workloads):
        command += ["--conversation", name]
    url = f"http://127.0.0.1:{port}"
    return Program("the trainer", command, url, cores.beside, dict(os.environ), _ROOT), grpc_port


async def get(http: aiohttp.ClientSession, url: str, kind: type[_T]) -> _T:
    """Return the parsed body of a GET request."""
    async with http.get(url) as response:
        return msgspec.json.decode(await response.read(), type=kind)


async def post(http: aiohttp.ClientSession, url: str, body: object, kind: type[_T]) -> _T:
    """Return the parsed body of the response to a POST request."""
    async with http.post(url, data=msgspec.json.encode(body)) as response:
        return msgspec.json.decode(await response.read(), type=kind)


async def send(http: aiohttp.ClientSession, url: str, body: object = None) -> None:
    """Send a POST request whose response has nothing to read."""
    async with http.post(url, data=msgspec.json.encode(body)) as response:
        response.raise_for_status()

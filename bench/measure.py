"""Runs a plan: starts the programs, runs the rounds, and measures their cost."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import grpc
import msgspec

from bench.child import Child, Cores, Program, busy_seconds, free_port, on_cores, running
from bench.conversation import Facts
from bench.drive import TOKENIZER, Order, Player, grpc_player, http_player, play_many
from bench.endpoint import EndpointRollouts, ProxyRollouts
from bench.result import Measured, Result, Round, Start
from bench.trainer import Counts
from bench.workload import FLOOR_FACTOR, WARM_UP, Entry, Plan, Workload

_T = TypeVar("_T")
_Rollouts = Callable[[int], AbstractAsyncContextManager[Player]]
"""Prepares that many rollouts and yields their player."""
_ROOT = Path(__file__).parents[1]
_KEEPALIVE_SECONDS = 2.0
"""Shorter than the server's idle timeout, because a request on a connection that is being closed is lost."""
_AGENTS = ("rollout_server.calculator:Calculator", str(_ROOT / "bench" / "own_loop.py"))
_PREFIXES = ("ROLLOUT_", "OSMOSIS_", "TOKENIZER_")


@dataclass(frozen=True, slots=True)
class _Site:
    """All running programs, and the connections to them."""

    start: Start
    server: Child
    trainer: Child
    floor: Child
    server_url: str
    trainer_url: str
    floor_url: str
    http: aiohttp.ClientSession
    channel: grpc.aio.Channel
    names: count[int]


async def run(plan: Plan, tokenizer: Path, say: Callable[[str], None]) -> Result:
    """Run a plan. Raises `ChildFailed` and `WrongRollout`."""
    cores = Cores.here()
    with on_cores(cores.beside):
        starts = [await _start_once(plan, tokenizer, cores, say) for _ in range(plan.starts - 1)]
        async with _site(plan, tokenizer, cores, say) as site:
            starts.append(site.start)
            measured: list[Measured] = []
            for workload in plan.workloads:
                measured += await _measure(site, workload, cores, say)
            counts = await get(site.http, f"{site.trainer_url}/counts", Counts)
            resident = site.server.resident_bytes()
    return Result(cores.apart, starts, resident, measured, counts)


async def _start_once(plan: Plan, tokenizer: Path, cores: Cores, say: Callable[[str], None]) -> Start:
    say("measuring the start of the server")
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        async with running(server_program(plan, tokenizer, cores, Path(directory))[0]) as server:
            return _started(server)


def _started(server: Child) -> Start:
    return Start(server.started_in, server.cpu_seconds(), server.resident_bytes())


@asynccontextmanager
async def _site(plan: Plan, tokenizer: Path, cores: Cores, say: Callable[[str], None]) -> AsyncIterator[_Site]:
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        say("starting server, trainer and floor")
        program, grpc_port = server_program(plan, tokenizer, cores, directory)
        server = await stack.enter_async_context(running(program))
        start = _started(server)
        trainer_of = trainer_program(plan, tokenizer, cores, program.url)
        trainer = await stack.enter_async_context(running(trainer_of))
        floor_program = _floor(cores, trainer_of.url)
        floor = await stack.enter_async_context(running(floor_program))
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS)
        session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300))
        options = [("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0)]
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}", options=options)
        yield _Site(
            start=start,
            server=server,
            trainer=trainer,
            floor=floor,
            server_url=program.url,
            trainer_url=trainer_of.url,
            floor_url=floor_program.url,
            http=await stack.enter_async_context(session),
            channel=await stack.enter_async_context(channel),
            names=count(1),
        )


def server_program(plan: Plan, tokenizer: Path, cores: Cores, directory: Path) -> tuple[Program, int]:
    """Return the server under test and its gRPC port. It runs in an empty directory, so that no `.env` changes its settings."""
    http_port, grpc_port = free_port(), free_port()
    command = [sys.executable, "-m", "rollout_server.cli", "serve", *_AGENTS, "--host", "127.0.0.1"]
    command += ["--http-port", str(http_port), "--grpc-port", str(grpc_port)]
    command += ["--tokenizer", f"{TOKENIZER}={tokenizer.resolve()}"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_PREFIXES)}
    environment = inherited | {
        "ROLLOUT_LOG_LEVEL": "warning",
        "MAX_CONCURRENT_ROLLOUTS": str(2 * plan.concurrency),
    }
    url = f"http://127.0.0.1:{http_port}"
    return Program("the server", command, url, cores.measured, environment, directory), grpc_port


def trainer_program(plan: Plan, tokenizer: Path, cores: Cores, gateway: str) -> Program:
    """Return the trainer, which fetches the tools from a gateway."""
    port = free_port()
    command = [sys.executable, "-m", "bench.trainer", str(port), "--tokenizer", str(tokenizer.resolve())]
    command += ["--tools-from", gateway]
    for name in dict.fromkeys(workload.conversation for workload in plan.workloads):
        command += ["--conversation", name]
    return Program("the trainer", command, f"http://127.0.0.1:{port}", cores.beside, dict(os.environ), _ROOT)


def _floor(cores: Cores, trainer: str) -> Program:
    port = free_port()
    command = [sys.executable, "-m", "bench.floor", str(port), trainer]
    return Program("the floor", command, f"http://127.0.0.1:{port}", cores.measured, dict(os.environ), _ROOT)


async def _measure(site: _Site, workload: Workload, cores: Cores, say: Callable[[str], None]) -> Sequence[Measured]:
    """Measure the floor's rounds, then the server's over each API."""
    facts = await get(site.http, f"{site.trainer_url}/conversations/{workload.conversation}", Facts)
    unjudged = Order(f"{site.trainer_url}/unjudged/{workload.conversation}", facts)
    judged = Order(f"{site.trainer_url}/judged/{workload.conversation}", facts)
    tools = (await get(site.http, f"{site.server_url}/tools", dict[str, Any]))["tools"]
    measured = []
    floors: dict[bool, list[Round]] = {}
    for entry in workload.entries:
        is_endpoint = entry is Entry.ENDPOINT
        if is_endpoint not in floors:
            say(f"{workload}: the floor")
            rollouts = _floor_rollouts(site, unjudged, tools, is_endpoint=is_endpoint)
            floors[is_endpoint] = await _rounds(
                rollouts, workload, FLOOR_FACTOR, _Timer(site.floor, site.trainer, cores)
            )
        say(f"{workload}: the server over {entry}")
        rollouts = _server_rollouts(site, entry, judged, tools)
        server = await _rounds(rollouts, workload, 1, _Timer(site.server, site.trainer, cores))
        measured.append(Measured(workload, entry, facts.prompt_tokens, server, floors[is_endpoint]))
    return measured


def _floor_rollouts(site: _Site, order: Order, tools: Sequence[Any], *, is_endpoint: bool) -> _Rollouts:
    if is_endpoint:
        return ProxyRollouts(site.http, site.floor_url, order, tools)
    return _unprepared(http_player(site.http, site.floor_url, order))


def _server_rollouts(site: _Site, entry: Entry, order: Order, tools: Sequence[Any]) -> _Rollouts:
    match entry:
        case Entry.ENDPOINT:
            return EndpointRollouts(site.http, site.server_url, order, tools, site.names)
        case Entry.GRPC:
            return _unprepared(grpc_player(site.channel, order))
        case Entry.HTTP:
            return _unprepared(http_player(site.http, site.server_url, order))


def _unprepared(play: Player) -> _Rollouts:
    """Return rollouts that the player starts itself."""

    @asynccontextmanager
    async def prepared(_: int) -> AsyncIterator[Player]:
        yield play

    return prepared


@dataclass(frozen=True, slots=True)
class _Timer:
    """Measures the CPU of one program, of trainer and driver, and of other processes on the program's core."""

    measured: Child
    trainer: Child
    cores: Cores

    async def time(self, work: Awaitable[None], turns: int) -> Round:
        """Await `work`, which consists of `turns` turns, and return its cost."""
        before = self._read()
        await work
        cpu, beside, busy, wall = (after - first for after, first in zip(self._read(), before, strict=True))
        return Round(turns, cpu=cpu, beside=beside, others=busy - cpu, wall=wall)

    def _read(self) -> tuple[float, float, float, float]:
        beside = self.trainer.cpu_seconds() + time.process_time()
        return self.measured.cpu_seconds(), beside, busy_seconds(self.cores.measured), time.perf_counter()


async def _rounds(prepared: _Rollouts, workload: Workload, factor: int, timer: _Timer) -> list[Round]:
    """Run a warm-up, which opens connections and loads tokenizers, and then the measured rounds."""
    warm_up = min(workload.concurrency, WARM_UP)
    async with prepared(warm_up) as play:
        await play_many(play, warm_up, workload.concurrency)
    rollouts = workload.rollouts * factor
    rounds = []
    for _ in range(workload.rounds):
        async with prepared(rollouts) as play:
            work = play_many(play, rollouts, workload.concurrency)
            rounds.append(await timer.time(work, rollouts * workload.turns))
    return rounds


async def get(http: aiohttp.ClientSession, url: str, kind: type[_T]) -> _T:
    """Return the parsed body of a GET request."""
    async with http.get(url) as response:
        return msgspec.json.decode(await response.read(), type=kind)

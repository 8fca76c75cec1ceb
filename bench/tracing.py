"""`python -m bench.tracing`: what OpenTelemetry adds to the CPU of a turn.

Two processes of the same program differ by more than the spans cost. So each server has a switch: while it is off, nothing is
traced or counted, as without an SDK. Rounds with and without alternate in the same process. The exporters do nothing, or encode the
spans for OTLP: the cost of sending them depends on the collector.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import runpy
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace
from functools import wraps
from mmap import mmap
from pathlib import Path
from statistics import median, stdev
from typing import Annotated, Any, Final

import aiohttp
import grpc
import typer
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from rich.console import Console
from rich.table import Table
from rollout_server.testing.tokenizer import TOY_TOKENIZER

from bench.judge.site import get, server_program, trainer_program
from bench.judge.workload import Api, Plan, Target, Workload
from bench.programs.child import Child, Cores, Program, on_cores, running
from bench.programs.conversation import Facts
from bench.programs.drive import Order, Player, grpc_player, http_player, play_many
from bench.programs.loop import new_loop

_WAYS: Final = {
    "metrics": ("metrics",),
    "spans": ("traces",),
    "spans and metrics": ("traces", "metrics"),
    "spans of one of ten rollouts, and metrics": ("traces", "sampled", "metrics"),
    "spans and metrics, and a thread that encodes the spans": ("traces", "metrics", "encoded"),
}
_APIS: Final = (Api.SYNC, Api.GRPC_HTTP)
_FILE: Final = "BENCH_SWITCH"
_WIDTH: Final = 132


def main(
    rounds: Annotated[int, typer.Option(help="Pairs of rounds of four rollouts for each server and API.")] = 100,
) -> None:
    """Print what spans and metrics add to the CPU of a turn, at ten turns and 1k context."""
    table = Table("API", "exported", "CPU of a turn, µs", "added, µs", "added", "standard error", box=None)
    workload = Workload(10, 1000, 4, 4, Target(2.0, "x"), _APIS, rounds=rounds)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        for api, way, without, added in runner.run(_measure(workload)):
            share, error = 100 * median(added) / without, 100 * 1.25 * stdev(added) / len(added) ** 0.5 / without
            table.add_row(api, way, f"{without:.0f}", f"{median(added):.0f}", f"{share:.1f} %", f"{error:.1f} %")
    Console(width=_WIDTH).print(table)


async def _measure(workload: Workload) -> list[tuple[Api, str, float, list[float]]]:
    """Return for each API and each way the CPU of a turn without tracing, and what each pair of rounds says is added, in µs."""
    plan, cores, found = Plan((workload,), 1), Cores.here(), []
    with on_cores(cores.beside):
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(aiohttp.ClientSession())
            with_tools, _ = server_program(plan, TOY_TOKENIZER, cores, _directory(stack))
            trainer, _ = trainer_program(plan, TOY_TOKENIZER, cores, with_tools.url)
            async with running(with_tools):
                await stack.enter_async_context(running(trainer))
            facts = await get(http, f"{trainer.url}/conversations/{workload.conversation}", Facts)
            order = Order(workload.conversation, f"{trainer.url}/judged/{workload.conversation}", facts)
            for way, signals in _WAYS.items():
                directory = _directory(stack)
                program, port = server_program(plan, TOY_TOKENIZER, cores, directory)
                switch = _Switch(directory / "switch")
                async with running(_traced(program, signals, switch)) as child, _channel(port) as channel:
                    for api in workload.apis:
                        is_http = api is Api.SYNC
                        play = http_player(http, program.url, order) if is_http else grpc_player(channel, order)
                        found.append((api, way, *await _compare(workload, play, child, switch)))
    return sorted(found, key=lambda row: _APIS.index(row[0]))


async def _compare(workload: Workload, play: Player, child: Child, switch: _Switch) -> tuple[float, list[float]]:
    """Return the CPU of a turn without tracing, and what it adds in each pair of rounds, in microseconds."""

    async def cost(on: bool) -> float:
        switch.turn(on)
        before = _cpu(child)
        await play_many(play, workload.rollouts, workload.concurrency)
        return 1e6 * (_cpu(child) - before) / (workload.rollouts * workload.turns)

    for on in (False, True):
        await cost(on)
    # Every other pair begins with the switch on, so that a machine that becomes slower or faster does not count for one of them.
    pairs = []
    for number in range(workload.rounds):
        first = await cost(bool(number % 2))
        pairs.append((first, await cost(not number % 2))[:: -1 if number % 2 else 1])
    return median(off for off, _ in pairs), [on - off for off, on in pairs]


def _directory(stack: AsyncExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))


def _cpu(child: Child) -> float:
    """Return the CPU time of all threads of a process in seconds, to the nanosecond."""
    threads = Path(f"/proc/{child.pid}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in threads) / 1e9


def _channel(port: int) -> grpc.aio.Channel:
    options = [("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0)]
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)


def _traced(program: Program, signals: Sequence[str], switch: _Switch) -> Program:
    """Return the program with an SDK for these signals."""
    environment = {**program.environment, "PYTHONPATH": str(Path(__file__).parents[1]), _FILE: str(switch.path)}
    arguments = program.command[3:]
    command = [sys.executable, "-m", "bench.tracing", "serve", ",".join(signals), *arguments]
    return replace(program, command=command, environment=environment)


class _Switch:
    """Whether the server traces and counts: a byte in a file, which it reads without a call of the operating system."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        with path.open("r+b") as file:
            file.truncate(1)
            self._byte = mmap(file.fileno(), 1)

    def turn(self, on: bool) -> None:
        """Turn it on or off. Nothing may run meanwhile."""
        self._byte[0] = on

    def switched(self, function: Callable[..., Any], instead: object) -> Callable[..., Any]:
        """Return the function; while the switch is off, it only returns `instead`."""

        @wraps(function)
        def run(*given: Any, **named: Any) -> Any:
            return function(*given, **named) if self._byte[0] else instead

        return run


# What follows runs in the server.


class _Spans(SpanExporter):
    def __init__(self, work: Callable[[Sequence[ReadableSpan]], object]) -> None:
        self._work = work

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._work(spans)
        return SpanExportResult.SUCCESS


class NoMetrics(MetricExporter):
    """An exporter of metrics that does nothing: there is one export in a minute."""

    def export(self, metrics_data: Any, timeout_millis: float = 0, **_: Any) -> MetricExportResult:
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 0) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 0, **_: Any) -> None:
        pass


def nothing() -> SpanExporter:
    """Return an exporter that does nothing."""
    return _Spans(lambda spans: None)


def encoding() -> SpanExporter:
    """Return an exporter that encodes the spans for OTLP."""
    return _Spans(lambda spans: encode_spans(spans).SerializeToString())


def _installed_exporters() -> str:
    """Return a directory with the metadata of an installed package: the server finds its exporters by their entry points."""
    directory = Path(tempfile.mkdtemp(prefix="bench-"))
    atexit.register(shutil.rmtree, directory)
    metadata = directory / "bench_exporters-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-exporters\nVersion: 1\n")
    traces = "bench_nothing = bench.tracing:nothing\nbench_encoded = bench.tracing:encoding\n"
    metrics = "bench_nothing = bench.tracing:NoMetrics\n"
    groups = f"[opentelemetry_traces_exporter]\n{traces}[opentelemetry_metrics_exporter]\n{metrics}"
    (metadata / "entry_points.txt").write_text(groups)
    return str(directory)


def serve(signals: Sequence[str], arguments: Sequence[str]) -> None:
    """Run the command line with exporters that send nothing. The server sets up the SDK, as it does for users."""
    from rollout_server.edge.tracing.tracing import Tracing
    from rollout_server.runtime.run.tracer import UNTRACED

    switch = _Switch(Path(os.environ[_FILE]))
    for method, instead in {
        "rollout": nullcontext(),
        "completion": UNTRACED,
        "tool": UNTRACED,
        "delivery": UNTRACED,
        "recorded": None,
    }.items():
        setattr(Tracing, method, switch.switched(getattr(Tracing, method), instead))
    sys.path.append(_installed_exporters())
    if "traces" in signals:
        os.environ["OTEL_TRACES_EXPORTER"] = "bench_encoded" if "encoded" in signals else "bench_nothing"
    if "sampled" in signals:
        os.environ |= {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.1"}
    if "metrics" in signals:
        os.environ["OTEL_METRICS_EXPORTER"] = "bench_nothing"
    sys.argv = ["rollout", *arguments]
    runpy.run_module("rollout_server.cli", run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2].split(","), sys.argv[3:])
    else:
        typer.run(main)

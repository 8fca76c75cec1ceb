"""`python -m bench.tracing`: what OpenTelemetry adds to the CPU of a turn, beside the same server without an SDK.

The rounds alternate between the servers, so that whatever else the machine does hits all of them. Two processes of the same program
differ by more than the spans cost, so all servers are started several times. The SDK has batching processors, and exporters that
do nothing or encode the spans: the cost of sending them depends on the collector.
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
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

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
from bench.programs.drive import Order, Player, grpc_player, play_many
from bench.programs.loop import new_loop

_WIDTH = 120
_WAYS = {
    "without an SDK": (),
    "spans": ("traces",),
    "metrics": ("metrics",),
    "spans and metrics": ("traces", "metrics"),
    "spans, encoded": ("traces", "encoded"),
    "one of ten rollouts, encoded": ("traces", "encoded", "sampled"),
    "the same, and metrics": ("traces", "encoded", "sampled", "metrics"),
}


def main(
    rounds: Annotated[int, typer.Option(help="Rounds of each process.")] = 8,
    starts: Annotated[int, typer.Option(help="Processes of each server.")] = 6,
    base: Annotated[Path | None, typer.Option(help="Another clone, whose server is measured too.")] = None,
) -> None:
    """Print the CPU of a turn at 1k context."""
    console = Console(stderr=True)
    workload = Workload(10, 1000, 16, 16, Target(2.0, "x"), (Api.GRPC_HTTP,), rounds=rounds)
    costs: dict[str, list[float]] = {}
    more: dict[str, list[float]] = {}
    with asyncio.Runner(loop_factory=new_loop) as runner:
        for number in range(starts):
            console.print(f"start {number + 1} of {starts}")
            measured = runner.run(_measure(workload, base))
            for name, found in measured.items():
                costs.setdefault(name, []).append(median(found))
                more.setdefault(name, []).append(_more(found, measured["without an SDK"]))
    table = Table("server", "ms of CPU per turn", "range of the processes", "more", "more, range", box=None)
    for name, found in costs.items():
        spread = (
            f"{min(found):.3f}-{max(found):.3f}",
            f"{median(more[name]):+.1f} %",
            f"{min(more[name]):+.1f} to {max(more[name]):+.1f} %",
        )
        table.add_row(name, f"{median(found):.3f}", *spread)
    Console(width=_WIDTH).print(table)


def _more(rounds: Sequence[float], beside: Sequence[float]) -> float:
    """Return by how many percent a server costs more than the one beside it: the median of rounds right after each other."""
    return median(100 * (each / other - 1) for each, other in zip(rounds, beside, strict=True))


async def _measure(workload: Workload, base: Path | None) -> dict[str, list[float]]:
    """Start the servers, and return the milliseconds of CPU per turn in each round of each of them."""
    plan, cores = Plan((workload,), 1), Cores.here()
    costs: dict[str, list[float]] = {}
    with on_cores(cores.beside):
        async with AsyncExitStack() as stack:
            players: dict[str, tuple[Child, Player]] = {}
            http = await stack.enter_async_context(aiohttp.ClientSession())
            trainer, first, order = "", "", None
            for name, signals in {**({"the other clone": ()} if base else {}), **_WAYS}.items():
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
                program, port = server_program(plan, TOY_TOKENIZER, cores, directory)
                program = _traced(program, signals, base if name == "the other clone" else None)
                child = await stack.enter_async_context(running(program))
                if order is None:
                    first = program.url
                    trainer_of, _ = trainer_program(plan, TOY_TOKENIZER, cores, first)
                    await stack.enter_async_context(running(trainer_of))
                    trainer = trainer_of.url
                    facts = await get(http, f"{trainer}/conversations/{workload.conversation}", Facts)
                    order = Order(workload.conversation, f"{trainer}/judged/{workload.conversation}", facts)
                channel = await stack.enter_async_context(_channel(port))
                players[name] = child, grpc_player(channel, order)
                await play_many(players[name][1], workload.concurrency, workload.concurrency)
            for _ in range(workload.rounds):
                for name, (child, play) in players.items():
                    before = _cpu_ms(child)
                    await play_many(play, workload.rollouts, workload.concurrency)
                    turns = workload.rollouts * workload.turns
                    costs.setdefault(name, []).append((_cpu_ms(child) - before) / turns)
    return costs


def _cpu_ms(child: Child) -> float:
    """Return the CPU time of all threads of a process, to the nanosecond: rounds are short."""
    threads = Path(f"/proc/{child.pid}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in threads) / 1e6


def _channel(port: int) -> grpc.aio.Channel:
    options = [("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0)]
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)


def _traced(program: Program, signals: Sequence[str], base: Path | None) -> Program:
    """Return the program with an SDK for these signals, or of another clone."""
    environment = dict(program.environment)
    if base is not None:
        environment["PYTHONPATH"] = ":".join(str(base / name) for name in ("server", "gateway", "generated"))
        return replace(program, environment=environment)
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    arguments = list(program.command[3:])
    return replace(
        program,
        command=[sys.executable, "-m", "bench.tracing", "serve", ",".join(signals), *arguments],
        environment=environment,
    )


def nothing() -> SpanExporter:
    """Return an exporter that does nothing."""
    return _NoSpans(lambda spans: None)


def encoding() -> SpanExporter:
    """Return an exporter that encodes the spans for OTLP."""
    return _NoSpans(lambda spans: encode_spans(spans).SerializeToString())


class NoMetrics(MetricExporter):
    """An exporter of metrics that does nothing."""

    def export(self, metrics_data: Any, timeout_millis: float = 0, **_: Any) -> MetricExportResult:
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 0) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 0, **_: Any) -> None:
        pass


class _NoSpans(SpanExporter):
    def __init__(self, work: Callable[[Sequence[ReadableSpan]], object]) -> None:
        self._work = work

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._work(spans)
        return SpanExportResult.SUCCESS


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


def serve(signals: str, arguments: Sequence[str]) -> None:
    """Run the command line with exporters that send nothing. The server sets up the SDK, as it does for users."""
    if signals:
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
        serve(sys.argv[2], sys.argv[3:])
    else:
        typer.run(main)

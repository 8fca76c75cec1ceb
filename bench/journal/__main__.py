"""`python -m bench.journal`: what the durable journal costs, beside the same workload with the memory journal.

It takes about 5 minutes on an idle machine, and prints the figures of docs/durability.md as Markdown.
The journal is written to a temporary directory in `--directory`. A directory in memory (tmpfs) would show no cost of the disk.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rollout_server.app import tune_interpreter

from bench.journal.recovery import Recovery, measure_recovery
from bench.journal.report import Figures, markdown, missed
from bench.journal.turns import CpuResult, DiskSync, LatencyResult, measure_cpu, measure_latency, sync_disk
from bench.journal.workload import LONG_PROMPT, Workload
from bench.programs.child import ChildFailed
from bench.programs.loop import new_loop

_CPU = (
    Workload(1, 60),
    Workload(50, 200),
    Workload(500, 500),
    Workload(50, 200, repeatable=False),
    Workload(50, 100, first_prompt=LONG_PROMPT),
)
_LATENCY = (Workload(1, 100), Workload(50, 200), Workload(500, 500), Workload(50, 200, repeatable=False))
_QUICK = (Workload(4, 8, turns=4), Workload(4, 8, turns=4, repeatable=False))
_ROUNDS = 3
_SYNCS = 300
_RECOVERY = (9_900, 100, 5)
_QUICK_RECOVERY = (20, 4, 5)


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Run small workloads, as a check of the benchmark.")] = False,
    directory: Annotated[
        Path | None,
        typer.Option(
            help="Where the journals are created.",
            exists=True,
            file_okay=False,
            show_default="the system's directory for temporary files",
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all results to this JSON file.")] = None,
) -> None:
    """Measure CPU and latency that the journal adds to a turn, what it writes, and the time of a restart.

    Exits with 1 if a rollout does not end as scripted, never because of a measured value.
    """
    console = Console(stderr=True)
    if not sys.platform.startswith("linux"):
        raise typer.Exit(_complain(console, "needs Linux: memory and written bytes are read from /proc"))
    place = directory or Path(tempfile.gettempdir())
    try:
        figures = _measure(console, place, quick=quick)
    except ChildFailed as error:
        raise typer.Exit(_complain(console, str(error))) from None
    print(markdown(figures))
    for text in missed(figures):
        console.print(f"target missed: {text}", markup=False)
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(figures), indent=2, default=_plain))


def _measure(console: Console, place: Path, *, quick: bool) -> Figures:
    tune_interpreter()
    console.print("measuring the disk")
    sync: DiskSync = sync_disk(place, 20 if quick else _SYNCS)
    cpu: list[CpuResult] = []
    latency: list[LatencyResult] = []
    with asyncio.Runner(loop_factory=new_loop) as runner:
        for workload in _QUICK if quick else _CPU:
            console.print(f"CPU, rollouts at once: {workload}")
            cpu.append(runner.run(measure_cpu(workload, place, 1 if quick else _ROUNDS)))
        for workload in _QUICK if quick else _LATENCY:
            console.print(f"latency, rollouts at once: {workload}")
            latency.append(runner.run(measure_latency(workload, place)))
    console.print("recovery")
    recovery: Recovery = measure_recovery(place, *(_QUICK_RECOVERY if quick else _RECOVERY))
    return Figures(sync, cpu, latency, recovery)


def _plain(value: Any) -> Sequence[Any] | str:
    return [*value] if isinstance(value, Sequence) else str(value)


def _complain(console: Console, text: str) -> int:
    console.print(f"bench.journal: {text}", style="red", markup=False)
    return 1


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()

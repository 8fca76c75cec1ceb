"""`python -m bench`: measure the CPU cost of one turn, in a few minutes."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rollout_server.testing.tokenizer import TOY_TOKENIZER

from bench import measure, report
from bench.child import ChildFailed
from bench.drive import WrongRollout
from bench.loop import new_loop
from bench.workload import FULL, QUICK

_WIDTH = 120


def main(
    quick: Annotated[
        bool, typer.Option("--quick", help="Run one small workload, as a check of the benchmark.")
    ] = False,
    tokenizer: Annotated[
        Path,
        typer.Option(
            help="Directory of a tokenizer with a chat template.",
            exists=True,
            file_okay=False,
            show_default="the built-in toy tokenizer",
        ),
    ] = TOY_TOKENIZER,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all results to this JSON file.")] = None,
) -> None:
    """Measure the server's CPU for one turn, beside a floor that runs the same conversation without token accounting.

    Exits with 1 if a mask is refused or a rollout does not end as scripted, never because of a measured value.
    """
    console = Console(stderr=True)
    if not sys.platform.startswith("linux"):
        raise typer.Exit(_complain(console, "needs Linux: CPU and memory are read from /proc"))
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            result = runner.run(measure.run(QUICK if quick else FULL, tokenizer, console.print))
    except (ChildFailed, WrongRollout) as error:
        raise typer.Exit(_complain(console, str(error))) from None
    name = "toy" if tokenizer == TOY_TOKENIZER else tokenizer.resolve().name
    report.show(result, name, Console(width=None if sys.stdout.isatty() else _WIDTH))
    if json_file is not None:
        json_file.write_bytes(report.as_json(result, name))
    if result.counts.masks_refused or result.counts.histories_refused:
        raise typer.Exit(_complain(console, "the trainer refused a mask or a history; see the faults above"))


def _complain(console: Console, text: str) -> int:
    console.print(f"bench: {text}", style="red", markup=False)
    return 1


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()

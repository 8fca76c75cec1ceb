"""`python -m bench`: measure the CPU cost of one turn and of one rollout, for each API."""

from __future__ import annotations

import asyncio
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import msgspec
from rich.console import Console
from rollout_server.testing.tokenizer import TOY_TOKENIZER

from bench.judge import measure, ratios, report
from bench.judge.result import Result
from bench.judge.workload import FULL, QUICK, Api
from bench.programs.child import ChildFailed
from bench.programs.drive import WrongRollout
from bench.programs.loop import new_loop

_WIDTH = 150
_NAMES = {api.name.lower().replace("_", "-"): api for api in Api}


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        "python -m bench",
        description="Measure the server's CPU for one turn, beside floors that run the same conversation without token "
        "accounting. Fails if a mask is refused or a rollout does not end as scripted, never because of a measured value.",
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="run small workloads, in half a minute")
    add("--tokenizer", type=Path, default=TOY_TOKENIZER, help="directory of a tokenizer; default: the built-in toy one")
    add("--workload", action="append", default=[], help="run only this workload, such as 10x1k/32; repeatable")
    add("--api", action="append", default=[], choices=sorted(_NAMES), help="run only this API; repeatable")
    add("--rounds", type=int, help="rounds of each workload")
    add("--base", type=Path, help="another clone, whose server is measured beside this one")
    add("--from", dest="source", type=Path, help="measure nothing; show the result in this JSON file")
    add("--json", type=Path, help="write all results to this JSON file")
    add("--markdown", type=Path, action="append", default=[], help="write the tables, between the markers if it exists")
    add("--record", type=Path, help="write the ratios to the floor to this JSON file")
    add("--check", type=Path, help="fail if a ratio is, twice in a row, more than double the one in this JSON file")
    add("--chart", type=Path, help="draw the chart into this SVG file")
    return parser


def main() -> int:
    """Run the benchmark, or show an earlier result."""
    options, console = _parser().parse_args(), Console(stderr=True)
    try:
        result = _measured(options, console) if options.source is None else report.read(options.source)
    except (ChildFailed, WrongRollout, ValueError) as error:
        return _complain(console, str(error))
    report.show(result, Console(width=None if sys.stdout.isatty() else _WIDTH))
    report.write(result, options.json, options.markdown, options.chart)
    if options.record is not None:
        ratios.record(result, options.record)
    if result.counts.masks_refused or result.counts.histories_refused:
        return _complain(console, "the trainer refused a mask or a history; see the faults above")
    return _check(result, options, console) if options.check is not None else 0


def _check(result: Result, options: Namespace, console: Console) -> int:
    """Compare with the recorded ratios. Rows that are off are measured again, because the machine may have been busy."""
    if again := [row for row, _ in ratios.off(result, options.check)]:
        options.workload = [row.workload for row in again]
        options.api = [name for name, api in _NAMES.items() if api in {row.api for row in again}]
        names = {(row.workload, row.api) for row in again}
        again = [row for row in _measured(options, console).rows if (row.workload, row.api) in names]
    found = [text for _, text in ratios.off(msgspec.structs.replace(result, rows=again), options.check)]
    for text in found:
        _complain(console, text)
    return int(bool(found))


def _measured(options: Namespace, console: Console) -> Result:
    if not sys.platform.startswith("linux"):
        raise ValueError("needs Linux: CPU and memory are read from /proc")
    plan = QUICK if options.quick else FULL
    plan = plan.only(options.workload, [_NAMES[name] for name in options.api], options.rounds)
    if not plan.workloads:
        raise ValueError(f"no such workload; one of {', '.join(each.name for each in FULL.workloads)}")
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(measure.run(plan, options.tokenizer.resolve(), console.print, options.base))


def _complain(console: Console, text: str) -> int:
    console.print(f"bench: {text}", style="red", markup=False)
    return 1


if __name__ == "__main__":
    sys.exit(main())

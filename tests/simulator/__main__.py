"""`python -m tests.simulator --seeds 0-1999` or `--seed 17`: see `--help`."""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.simulator.coverage import missing, table
from tests.simulator.planted import PLANTED, planted
from tests.simulator.runner import Report, digest, failure_text, run_parallel, run_seed


def main() -> int:
    """Run what the command line names. Return 1 if a law was broken or something was never reached."""
    parser = argparse.ArgumentParser(
        "tests.simulator", description="Run simulated worlds of the server with faults and crashes."
    )
    parser.add_argument(
        "--seeds", default="0-1999", help="first and last seed, as in 0-49999; a digit range or one number"
    )
    parser.add_argument("--seed", type=int, help="run one seed, twice, and print its trace")
    parser.add_argument("--planted", choices=sorted(PLANTED), help="plant this fault in the server first")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if options.planted:
        with planted(options.planted):
            return _run(options)
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    if options.seed is not None:
        return _run_one(options.seed)
    first, _, last = options.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    report, began = Report(), time.monotonic()
    for part in run_parallel(seeds, 1 if options.planted else options.jobs):
        report.add(part)
        _print(failure_text(part.broken))
        _print(
            f"{report.seeds} of {len(seeds)} seeds, {len(report.broken)} broken, {time.monotonic() - began:.0f} s",
            sys.stderr,
        )
    _print(table(report.cells, report.faults))
    _print("outcomes: " + ", ".join(f"{count} {end}" for end, count in report.ends.most_common()))
    never = [*missing(report.cells, report.faults)]
    _print("\n".join(never))
    return int(bool(report.broken or never))


def _run_one(seed: int) -> int:
    world, again = run_seed(seed), run_seed(seed)
    _print("\n".join(world.trace))
    _print("\n".join(f"BROKEN: {text}" for text in world.laws.broken))
    same = digest(world) == digest(again)
    _print(
        f"seed {seed}: {len(world.trace)} lines, digest {digest(world)}, {'equal' if same else 'DIFFERENT'} when it ran again"
    )
    return int(bool(world.laws.broken) or not same)


def _print(text: str, stream: object = None) -> None:
    if text:
        out = sys.stdout if stream is None else sys.stderr
        out.write(text + "\n")
        out.flush()


if __name__ == "__main__":
    sys.exit(main())

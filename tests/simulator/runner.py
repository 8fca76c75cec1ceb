"""Runs seeds, on several processors if asked to, and reports what they found and reached."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b

from tests.simulator.checkers import check_world, summary
from tests.simulator.coverage import Cell
from tests.simulator.faults import Fault
from tests.simulator.world import World

_AT_ONCE = 250


@dataclass
class Report:
    """What a range of seeds found. `broken` has the violations by seed, `ends` the outcomes by kind."""

    seeds: int = 0
    broken: dict[int, list[str]] = field(default_factory=dict)
    cells: Counter[Cell] = field(default_factory=Counter)
    faults: Counter[Fault] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)

    def add(self, other: Report) -> None:
        """Add another range."""
        self.seeds += other.seeds
        self.broken |= other.broken
        self.cells += other.cells
        self.faults += other.faults
        self.ends += other.ends


def run_seed(seed: int) -> World:
    """Run one world to its end, and check it. What goes wrong in the world itself counts as a violation, too."""
    world = World(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # coroutines that a crash destroyed before their first step
        try:
            world.run()
            check_world(world)
        except Exception as error:
            world.laws.require(False, f"{type(error).__name__}: {error}")
    return world


def digest(world: World) -> str:
    """Return a digest of all that happened in a world."""
    return blake2b("\n".join([*world.trace, *world.laws.broken]).encode(), digest_size=16).hexdigest()


def run_seeds(seeds: Iterable[int]) -> Report:
    """Run worlds, one after the other."""
    report = Report()
    for seed in seeds:
        world = run_seed(seed)
        if world.laws.broken:
            report.broken[seed] = world.laws.broken
        report.add(Report(1, {}, world.cells, world.faults.hits, Counter(summary(world))))
    return report


def run_parallel(seeds: range, jobs: int) -> Iterator[Report]:
    """Run worlds in several processes. Yield a report for each part."""
    parts = [seeds[at : at + _AT_ONCE] for at in range(0, len(seeds), _AT_ONCE)]
    if jobs == 1:
        yield from map(run_seeds, parts)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run_seeds, parts)


def failure_text(broken: dict[int, list[str]]) -> str:
    """Return the violations, each with the command that shows how it came to them."""
    lines: Sequence[str] = [
        f"seed {seed}: {text}\n    python -m tests.simulator --seed {seed}"
        for seed, (text, *_) in sorted(broken.items())
    ]
    return "\n".join(lines)

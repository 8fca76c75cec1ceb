"""Results of a benchmark run. They are read from and written to JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import msgspec

from bench.judge.workload import Target
from bench.programs.tally import Counts, Traffic

START_TARGET = 1.5
"""Target for the seconds from start until healthy."""

GATEWAY_TARGET = 1.0
"""Target for the milliseconds of CPU that HTTP adds to a rollout."""

GROWTH_TARGET = 1.3
"""Target for the CPU of a turn in token mode at 32k tokens, as a multiple of that at 1k."""


class Round(msgspec.Struct, frozen=True):
    """One round. In seconds: CPU of the program, of trainer and driver, of other processes on its core, and wall time."""

    turns: int
    cpu: float
    beside: float
    others: float
    wall: float
    traffic: Traffic


class Cost(msgspec.Struct, frozen=True):
    """Summary of one program's rounds.

    Args:
        cpu_ms: median of the CPU of a turn in milliseconds; `cpu_ms_low`, `cpu_ms_high`: its range.
        rollout_ms: CPU of a rollout.
        turns_per_second: median.
        gap_p50, gap_p99: milliseconds from the trainer's response to the next request of the same rollout, medians of the
            rounds' percentiles; 0 if unknown.
        sent: bytes of the requests to the trainer per turn.
        lag_p99: milliseconds by which the event loop woke a sleeping task late, at most; None if it was not measured.
        waiting: bytes of memory of a rollout that waits for the trainer; None if it was not measured.
        beside_ms: CPU of trainer and driver per turn.
        others_share: the largest share of the program's core that other processes used in a round, from 0 to 1.
    """

    cpu_ms: float
    cpu_ms_low: float
    cpu_ms_high: float
    rollout_ms: float
    turns_per_second: float
    gap_p50: float
    gap_p99: float
    sent: float
    lag_p99: float | None
    waiting: float | None
    beside_ms: float
    others_share: float

    @property
    def held_up(self) -> bool:
        """Whether trainer and driver limited the turns per second, because they were busy more than 90 % of the time."""
        return self.beside_ms * self.turns_per_second > 900


def summary(rounds: Sequence[Round], turns: int, lag_p99: float | None, waiting: float | None) -> Cost:
    """Summarize the rounds of rollouts of so many turns."""
    cpu = sorted(1000 * one.cpu / one.turns for one in rounds)
    return Cost(
        cpu_ms=median(cpu),
        cpu_ms_low=cpu[0],
        cpu_ms_high=cpu[-1],
        rollout_ms=median(cpu) * turns,
        turns_per_second=median(one.turns / one.wall for one in rounds),
        gap_p50=median(one.traffic.gap_p50 for one in rounds),
        gap_p99=median(one.traffic.gap_p99 for one in rounds),
        sent=sum(one.traffic.sent for one in rounds) / sum(one.turns for one in rounds),
        lag_p99=lag_p99,
        waiting=waiting,
        beside_ms=median(1000 * one.beside / one.turns for one in rounds),
        others_share=max(0.0, *(one.others / one.wall for one in rounds)),
    )


class Row(msgspec.Struct, frozen=True):
    """One workload over one API, and its floor. `journal`: where the server kept its rollouts, or which server it was."""

    workload: str
    title: str
    turns: int
    api: str
    journal: str
    prompt_tokens: Sequence[int]
    server: Cost
    floor: Cost
    target: Target | None

    @property
    def ratio(self) -> float:
        """CPU per turn of the server, divided by that of the floor."""
        return self.server.cpu_ms / self.floor.cpu_ms

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        return (self.ratio if self.target.unit == "x" else self.server.cpu_ms) <= self.target.most


class Start(msgspec.Struct, frozen=True):
    """One start of the server: seconds until it was healthy, CPU seconds until then, and memory in bytes at that time."""

    seconds: float
    cpu: float
    resident: int


class Check(msgspec.Struct, frozen=True):
    """A figure of the whole server, and the most that it may be."""

    name: str
    value: float
    most: float
    unit: str

    @property
    def met(self) -> bool:
        """Whether the figure is within its target."""
        return self.value <= self.most


class Result(msgspec.Struct, frozen=True):
    """Results of a whole run. `apart`: the server had a core for itself. `resident`: its memory at the end, in bytes."""

    machine: Mapping[str, Any]
    tokenizer: str
    apart: bool
    starts: Sequence[Start]
    resident: int
    rows: Sequence[Row]
    counts: Counts

    def row(self, workload: str, api: str, journal: str) -> Row | None:
        """Return a row; None if it was not measured."""
        found = (row for row in self.rows if (row.workload, row.api, row.journal) == (workload, api, journal))
        return next(found, None)

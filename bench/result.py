"""Results of a benchmark run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.trainer import Counts
from bench.workload import Entry, Workload

START_TARGET = 1.5
"""Target for the seconds from start until healthy."""

GATEWAY_TARGET = 1.0
"""Target for the milliseconds of CPU that the gateway adds to a rollout."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round. In seconds: CPU of the program, of trainer and driver, of other processes on its core, and wall time."""

    turns: int
    cpu: float
    beside: float
    others: float
    wall: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Summary of one program's rounds: medians, and the range of CPU. Times are in milliseconds per turn.

    `others_share` is the largest share of the program's core that other processes used in a round, from 0 to 1.
    """

    cpu_ms: float
    cpu_ms_low: float
    cpu_ms_high: float
    turns_per_second: float
    beside_ms: float
    others_share: float

    @classmethod
    def of(cls, rounds: Sequence[Round]) -> Cost:
        """Summarize rounds."""
        cpu = sorted(1000 * one.cpu / one.turns for one in rounds)
        return cls(
            cpu_ms=median(cpu),
            cpu_ms_low=cpu[0],
            cpu_ms_high=cpu[-1],
            turns_per_second=median(one.turns / one.wall for one in rounds),
            beside_ms=median(1000 * one.beside / one.turns for one in rounds),
            others_share=max(0.0, *(one.others / one.wall for one in rounds)),
        )

    @property
    def held_up(self) -> bool:
        """Whether trainer and driver limited the turns per second, because they were busy more than 90 % of the time."""
        return self.beside_ms * self.turns_per_second > 900


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of one workload over one API, and of the floor. `prompt_tokens` has one length per turn."""

    workload: Workload
    entry: Entry
    prompt_tokens: Sequence[int]
    server_rounds: Sequence[Round]
    floor_rounds: Sequence[Round]

    @property
    def server(self) -> Cost:
        """Cost of the server."""
        return Cost.of(self.server_rounds)

    @property
    def floor(self) -> Cost:
        """Cost of the floor."""
        return Cost.of(self.floor_rounds)

    @property
    def ratio(self) -> float:
        """CPU per turn of the server, divided by that of the floor."""
        return self.server.cpu_ms / self.floor.cpu_ms


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the server: seconds until it was healthy, CPU seconds until then, and memory in bytes at that time."""

    seconds: float
    cpu: float
    resident: int


@dataclass(frozen=True, slots=True)
class Gateway:
    """Additional CPU of a rollout over HTTP compared with gRPC, in milliseconds, with `noise` as its uncertainty."""

    ms: float
    noise: float


@dataclass(frozen=True, slots=True)
class Result:
    """Results of a whole run. `apart`: the server had a core for itself. `resident`: its memory at the end, in bytes."""

    apart: bool
    starts: Sequence[Start]
    resident: int
    measured: Sequence[Measured]
    counts: Counts

    @property
    def start_seconds(self) -> float:
        """Median of the seconds from start until healthy."""
        return median(start.seconds for start in self.starts)

    @property
    def start_cpu(self) -> float:
        """Median of the CPU seconds from start until healthy."""
        return median(start.cpu for start in self.starts)

    @property
    def idle_resident(self) -> float:
        """Median of the memory before the first rollout, in bytes."""
        return median(start.resident for start in self.starts)

    @property
    def gateway(self) -> Gateway | None:
        """CPU that HTTP adds to a rollout, from the shortest workload with both APIs and several rounds; None without one."""
        found = {(one.workload, one.entry): one for one in self.measured}
        repeated = [workload for workload, entry in found if entry is Entry.GRPC and workload.rounds > 1]
        both = [workload for workload in repeated if (workload, Entry.HTTP) in found]
        if not both:
            return None
        shortest = min(both, key=lambda workload: workload.turns)
        over_http, over_grpc = found[shortest, Entry.HTTP].server, found[shortest, Entry.GRPC].server
        ranges = over_http.cpu_ms_high - over_http.cpu_ms_low + over_grpc.cpu_ms_high - over_grpc.cpu_ms_low
        return Gateway((over_http.cpu_ms - over_grpc.cpu_ms) * shortest.turns, ranges * shortest.turns / 2)

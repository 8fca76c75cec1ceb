"""What a run has found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.trainer import Counts
from bench.workload import Entry, Workload

START_TARGET = 1.5
"""Seconds from start to healthy."""

GATEWAY_TARGET = 1.0
"""Milliseconds of CPU that the gateway may add to a rollout."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round, in seconds: CPU of the program, of trainer and driver beside it, of others on the program's core; and wall."""

    turns: int
    cpu: float
    beside: float
    others: float
    wall: float


@dataclass(frozen=True, slots=True)
class Cost:
    """The rounds of one program put together: medians, and the range of CPU. Times are in milliseconds a turn.

    `others_share` is the most that others took of the program's core in a round, from 0 to 1.
    """

    cpu_ms: float
    cpu_ms_low: float
    cpu_ms_high: float
    turns_per_second: float
    beside_ms: float
    others_share: float

    @classmethod
    def of(cls, rounds: Sequence[Round]) -> Cost:
        """The median of each figure."""
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
        """Trainer and driver were busy nearly all the time, so turns a second say more about them."""
        return self.beside_ms * self.turns_per_second > 900


@dataclass(frozen=True, slots=True)
class Measured:
    """One workload over one way in, beside the floor. `prompt_tokens` has one length a turn."""

    workload: Workload
    entry: Entry
    prompt_tokens: Sequence[int]
    server_rounds: Sequence[Round]
    floor_rounds: Sequence[Round]

    @property
    def server(self) -> Cost:
        """What the server used."""
        return Cost.of(self.server_rounds)

    @property
    def floor(self) -> Cost:
        """What the floor used."""
        return Cost.of(self.floor_rounds)

    @property
    def ratio(self) -> float:
        """The server's CPU a turn over the floor's."""
        return self.server.cpu_ms / self.floor.cpu_ms


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the server: seconds until it was healthy, and until then CPU in seconds and memory in bytes."""

    seconds: float
    cpu: float
    resident: int


@dataclass(frozen=True, slots=True)
class Gateway:
    """CPU that a rollout costs more over HTTP than over gRPC, in milliseconds, give or take `noise`."""

    ms: float
    noise: float


@dataclass(frozen=True, slots=True)
class Result:
    """A whole run. `apart` says whether the server had a core of its own; `resident` is its memory at the end, in bytes."""

    apart: bool
    starts: Sequence[Start]
    resident: int
    measured: Sequence[Measured]
    counts: Counts

    @property
    def start_seconds(self) -> float:
        """From start to healthy, the median."""
        return median(start.seconds for start in self.starts)

    @property
    def start_cpu(self) -> float:
        """CPU from start to healthy, the median, in seconds."""
        return median(start.cpu for start in self.starts)

    @property
    def idle_resident(self) -> float:
        """Memory before the first rollout, the median, in bytes."""
        return median(start.resident for start in self.starts)

    @property
    def gateway(self) -> Gateway | None:
        """What HTTP adds to a rollout, from the shortest ones measured both ways in several rounds; None if there are none."""
        found = {(one.workload, one.entry): one for one in self.measured}
        repeated = [workload for workload, entry in found if entry is Entry.GRPC and workload.rounds > 1]
        both = [workload for workload in repeated if (workload, Entry.HTTP) in found]
        if not both:
            return None
        shortest = min(both, key=lambda workload: workload.turns)
        over_http, over_grpc = found[shortest, Entry.HTTP].server, found[shortest, Entry.GRPC].server
        ranges = over_http.cpu_ms_high - over_http.cpu_ms_low + over_grpc.cpu_ms_high - over_grpc.cpu_ms_low
        return Gateway((over_http.cpu_ms - over_grpc.cpu_ms) * shortest.turns, ranges * shortest.turns / 2)

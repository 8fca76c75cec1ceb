"""Workloads of the benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Entry(StrEnum):
    """API that the driver uses: to start rollouts, or the model endpoint of rollouts whose agent it is."""

    HTTP = "http"
    GRPC = "grpc"
    ENDPOINT = "endpoint"


@dataclass(frozen=True, slots=True)
class Workload:
    """Rollouts of one conversation.

    Args:
        turns: completions of one rollout. Each but the last has one tool call.
        context: average length of a prompt over the turns, in tokens.
        concurrency: rollouts that run at the same time.
        rollouts: rollouts per round on the server; the floor runs `FLOOR_FACTOR` times as many.
        rounds: number of measured rounds.
        target: maximum CPU of the server as a multiple of the floor's; None: no target.
        entries: APIs to measure. The floor has HTTP only; the floor of the endpoint is a bare proxy.
    """

    turns: int
    context: int
    concurrency: int
    rollouts: int
    rounds: int
    target: float | None
    entries: tuple[Entry, ...] = (Entry.HTTP,)

    @property
    def conversation(self) -> str:
        """Name of the conversation at the trainer."""
        return f"{self.turns}x{self.context}"

    def __str__(self) -> str:
        context = f"{self.context / 1000:g}k" if self.context >= 1000 else str(self.context)
        turns = f"{self.turns} turns" if self.turns > 1 else "1 turn"
        return f"{turns}, {context}, {self.concurrency} at once"


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole run: the workloads, and how often to start the server to measure its start."""

    workloads: tuple[Workload, ...]
    starts: int

    @property
    def concurrency(self) -> int:
        """Maximum number of concurrent rollouts."""
        return max(workload.concurrency for workload in self.workloads)


FLOOR_FACTOR = 6
"""The floor is several times faster than the server, and a round must be long enough to measure."""

WARM_UP = 64
"""Maximum number of rollouts of a warm-up, which runs as many as are concurrent."""

_BOTH = (Entry.HTTP, Entry.GRPC)
_ENDPOINT = (Entry.ENDPOINT,)

FULL = Plan(
    (
        Workload(turns=10, context=1000, concurrency=32, rollouts=64, rounds=3, target=2.0, entries=_BOTH),
        Workload(turns=10, context=8000, concurrency=16, rollouts=32, rounds=3, target=1.5),
        Workload(turns=10, context=1000, concurrency=256, rollouts=256, rounds=2, target=2.0),
        # Short rollouts, so that the difference between the APIs is visible.
        Workload(turns=1, context=500, concurrency=32, rollouts=256, rounds=3, target=None, entries=_BOTH),
        Workload(turns=10, context=1000, concurrency=32, rollouts=64, rounds=3, target=None, entries=_ENDPOINT),
        Workload(turns=10, context=8000, concurrency=16, rollouts=32, rounds=3, target=None, entries=_ENDPOINT),
    ),
    starts=3,
)
QUICK = Plan(
    (
        Workload(turns=4, context=1000, concurrency=4, rollouts=8, rounds=1, target=2.0, entries=_BOTH),
        Workload(turns=4, context=1000, concurrency=4, rollouts=8, rounds=1, target=None, entries=_ENDPOINT),
    ),
    starts=1,
)

"""What is measured."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Entry(StrEnum):
    """The way in which rollouts are asked for."""

    HTTP = "http"
    GRPC = "grpc"


@dataclass(frozen=True, slots=True)
class Workload:
    """Rollouts of one conversation.

    Args:
        turns: completions of one rollout. All but the last call one tool.
        context: tokens of a prompt, the average over the turns.
        concurrency: rollouts under way at the same time.
        rollouts: how many make one round on the server; the floor plays `FLOOR_FACTOR` times as many.
        rounds: how many there are.
        target: how many times the floor's CPU the server may use; None: there is no target.
        entries: the ways in that are measured. The floor has HTTP only.
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
        """The name under which the trainer knows the conversation."""
        return f"{self.turns}x{self.context}"

    def __str__(self) -> str:
        context = f"{self.context / 1000:g}k" if self.context >= 1000 else str(self.context)
        turns = f"{self.turns} turns" if self.turns > 1 else "1 turn"
        return f"{turns}, {context}, {self.concurrency} at once"


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole run: the workloads, and how often the server is started to time its start."""

    workloads: tuple[Workload, ...]
    starts: int

    @property
    def concurrency(self) -> int:
        """The most rollouts that are ever under way."""
        return max(workload.concurrency for workload in self.workloads)


FLOOR_FACTOR = 6
"""The floor is several times faster, and a round should be long enough to be timed."""

WARM_UP = 64
"""The most rollouts of a warm-up, which has as many as are under way at the same time."""

_BOTH = (Entry.HTTP, Entry.GRPC)

FULL = Plan(
    (
        Workload(turns=10, context=1000, concurrency=32, rollouts=64, rounds=3, target=2.0, entries=_BOTH),
        Workload(turns=10, context=8000, concurrency=16, rollouts=32, rounds=3, target=1.5),
        Workload(turns=10, context=1000, concurrency=256, rollouts=256, rounds=2, target=2.0),
        # So short that the ways in can be told apart.
        Workload(turns=1, context=500, concurrency=32, rollouts=256, rounds=3, target=None, entries=_BOTH),
    ),
    starts=3,
)
QUICK = Plan(
    (Workload(turns=4, context=1000, concurrency=4, rollouts=8, rounds=1, target=2.0, entries=_BOTH),), starts=1
)

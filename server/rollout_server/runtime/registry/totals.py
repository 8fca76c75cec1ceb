"""Counts of a server since its start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollout_server.core.outcome import Stop
from rollout_server.core.record import Answered
from rollout_server.runtime.log import Entry
from rollout_server.runtime.rollout import Rollout


@dataclass(slots=True)
class Totals:
    """What this process has counted. What earlier processes did is not in it.

    Attributes:
        finished: rollouts that finished.
        failed: those of them that failed or were cancelled.
        turns: completions.
        generated_tokens: their tokens, as far as they are known.
    """

    finished: int = 0
    failed: int = 0
    turns: int = 0
    generated_tokens: int = 0

    def count_end(self, rollout: Rollout) -> None:
        """Count a rollout that finished."""
        self.finished += 1
        self.failed += rollout.outcome is not None and not isinstance(rollout.outcome.end, Stop)

    def count_turns(self, entries: Sequence[Entry]) -> None:
        """Count the completions among new entries of a log."""
        for entry in entries:
            if isinstance(entry.record, Answered):
                self.turns += 1
                self.generated_tokens += entry.record.generated

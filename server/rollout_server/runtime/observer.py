"""What wants to know of everything that happens, without taking part: metrics."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from rollout_server.runtime.log import Entry
from rollout_server.runtime.rollout import Rollout


class Attempt(Enum):
    """How one attempt to deliver an outcome went."""

    ACKNOWLEDGED = "acknowledged"
    REFUSED = "refused"
    FAILED = "failed"


class Observer(Protocol):
    """Is called on the event loop and must neither block nor raise."""

    def recorded(self, rollout: Rollout, entries: Sequence[Entry]) -> None:
        """These entries were added to the rollout's log, which holds them already."""

    def delivered(self, rollout: Rollout, attempt: Attempt, milliseconds: float) -> None:
        """One attempt to deliver the rollout's outcome is over."""


class NoObserver:
    """Observes nothing."""

    def recorded(self, rollout: Rollout, entries: Sequence[Entry]) -> None:
        """Takes no note."""

    def delivered(self, rollout: Rollout, attempt: Attempt, milliseconds: float) -> None:
        """Takes no note."""

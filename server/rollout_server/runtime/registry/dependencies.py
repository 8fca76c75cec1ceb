"""What a registry of rollouts depends on: the ports of delivery and of observation, the clock, and what tools share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from rollout_server.core.spec import Target
from rollout_server.runtime.log import Entry
from rollout_server.runtime.outcome_delivery import DeliveryRefused, PackedOutcome, Receipt
from rollout_server.runtime.ports import Clock
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.tools.resources import ToolResources


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
    """An observer that ignores what happens: the default where nobody counts."""

    def recorded(self, rollout: Rollout, entries: Sequence[Entry]) -> None:
        """Ignores the entries."""

    def delivered(self, rollout: Rollout, attempt: Attempt, milliseconds: float) -> None:
        """Ignores the attempt."""


class Reporter(Protocol):
    """Tells receivers of outcomes."""

    def pack(self, rollout: Rollout, target: Target, key: str) -> bytes:
        """The outcome of a finished rollout as the receiver takes it."""

    async def deliver(self, packed: PackedOutcome) -> Receipt:
        """Sends it once. Whatever goes wrong on the way is a receipt."""


@dataclass(frozen=True, slots=True)
class DeliveryRetryPolicy:
    """How long an outcome is offered. All in seconds but `retries`.

    Args:
        expiry: after this it is given up.
        first, most: the wait after the first attempt, which doubles with each one, and the longest wait.
        retries: attempts after the first; None: as many as there is time for.
    """

    expiry: float = 3600.0
    first: float = 1.0
    most: float = 30.0
    retries: int | None = None


class NoReporter:
    """A reporter that delivers no outcomes: the default where no receiver can be named."""

    def pack(self, rollout: Rollout, target: Target, key: str) -> bytes:
        """Returns no bytes: nothing is sent."""
        return b""

    async def deliver(self, packed: PackedOutcome) -> Receipt:
        """Refuses for good, so that the outcome is not retried."""
        return DeliveryRefused("this server tells nobody of outcomes")


@dataclass(frozen=True, slots=True)
class RegistryDependencies:
    """Where time comes from, who watches, who tells of outcomes and how patiently, and where tools are run (None: anywhere)."""

    clock: Clock = Clock()
    observer: Observer = field(default_factory=NoObserver)
    reporter: Reporter = field(default_factory=NoReporter)
    retry_policy: DeliveryRetryPolicy = DeliveryRetryPolicy()
    tool_resources: ToolResources | None = None

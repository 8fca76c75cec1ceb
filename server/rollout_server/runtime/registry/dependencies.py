"""What a roster lives among."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout_server.core.spec import Target
from rollout_server.runtime.delivery import DeliveryRefused, Receipt
from rollout_server.runtime.observer import NoObserver, Observer
from rollout_server.runtime.ports import Clock, PackedOutcome, Reporter
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.tools.resources import ToolResources


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
    """Tells nobody."""

    def pack(self, rollout: Rollout, target: Target, key: str) -> bytes:
        """Nothing."""
        return b""

    async def deliver(self, parcel: PackedOutcome) -> Receipt:
        """Refuses."""
        return DeliveryRefused("this server tells nobody of outcomes")


@dataclass(frozen=True, slots=True)
class RegistryDependencies:
    """Where time comes from, who watches, who tells of outcomes and how patiently, and where tools are run (None: anywhere)."""

    clock: Clock = Clock()
    observer: Observer = field(default_factory=NoObserver)
    reporter: Reporter = field(default_factory=NoReporter)
    patience: DeliveryRetryPolicy = DeliveryRetryPolicy()
    workbench: ToolResources | None = None

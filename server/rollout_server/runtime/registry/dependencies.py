"""Dependencies of the registry: ports of delivery and observation, clock, and resources that tools share."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from random import random
from typing import Protocol, TypeAlias

from rollout_server.core.capture.rendering import LaterSystem
from rollout_server.core.outcome import summary_of
from rollout_server.core.spec import Spec, Target
from rollout_server.runtime.agent_protocol import AgentProtocol
from rollout_server.runtime.aio.source_location import defined_at
from rollout_server.runtime.capture.endpoint import ModelAccess, count_nothing, no_later_system, no_model_access
from rollout_server.runtime.journal import Journal, MemoryJournal, StoredGroup
from rollout_server.runtime.log import Entry
from rollout_server.runtime.models import FurtherModels, NoFurtherModels
from rollout_server.runtime.outcome_delivery import DeliveryRefused, PackedOutcome, Receipt
from rollout_server.runtime.ports import Clock
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.run.tracer import NoTracer, Tracer
from rollout_server.runtime.tools.resources import ToolResources

RestoreGroups: TypeAlias = Callable[[Sequence[StoredGroup], Mapping[str, Rollout]], None]
"""Rebuilds the groups of earlier processes from their rollouts by uid."""
_log = logging.getLogger(__name__)


class Attempt(Enum):
    """Result of one attempt to deliver an outcome."""

    ACKNOWLEDGED = "acknowledged"
    REFUSED = "refused"
    FAILED = "failed"


class Observer(Protocol):
    """Observes rollouts. Its methods run on the event loop and must neither block nor raise."""

    def recorded(self, rollout: Rollout, entries: Sequence[Entry]) -> None:
        """Called after these entries of the rollout's log were published."""

    def delivered(self, rollout: Rollout, attempt: Attempt, milliseconds: float) -> None:
        """Called after one attempt to deliver the rollout's outcome."""


class NoObserver:
    """An observer that does nothing: the default."""

    def recorded(self, rollout: Rollout, entries: Sequence[Entry]) -> None:
        """Ignore the entries."""

    def delivered(self, rollout: Rollout, attempt: Attempt, milliseconds: float) -> None:
        """Ignore the attempt."""


class Observers:
    """Several observers as one."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def recorded(self, rollout: Rollout, entries: Sequence[Entry]) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.recorded(rollout, entries)

    def delivered(self, rollout: Rollout, attempt: Attempt, milliseconds: float) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.delivered(rollout, attempt, milliseconds)


def log_finished(rollout: Rollout) -> None:
    """Log one line about a finished rollout."""
    if rollout.outcome is not None:
        extra = {"rollout_uid": rollout.uid, "rollout_id": rollout.spec.rollout_id, "turn": rollout.machine.turn}
        _log.info("rollout finished: %s", summary_of(rollout.outcome), extra=extra)


class Reporter(Protocol):
    """Sends outcomes to their receivers."""

    def pack(self, rollout: Rollout, target: Target, key: str) -> bytes:
        """Serialize the outcome of a finished rollout in the receiver's format."""

    async def deliver(self, packed: PackedOutcome) -> Receipt:
        """Make one attempt to send the outcome. Errors are returned as a receipt, not raised."""


@dataclass(frozen=True, slots=True)
class DeliveryRetryPolicy:
    """How often and how long delivery of an outcome is retried. All values but `retries` are in seconds.

    Args:
        expiry: total time, after which delivery is abandoned.
        first, most: backoff after the first attempt, which doubles with each attempt, and its maximum.
        retries: attempts after the first; None: as many as fit into `expiry`.
        jitter: each wait is longer by a random part of this fraction of it, so that outcomes of a group do not come all at once.
    """

    expiry: float = 3600.0
    first: float = 1.0
    most: float = 30.0
    retries: int | None = None
    jitter: float = 0.0

    @property
    def longest(self) -> float:
        """The longest backoff in seconds."""
        return self.most * (1 + self.jitter)

    def backoff(self, attempts: int) -> float:
        """Return the seconds to wait after this many attempts."""
        # Bounded exponent: a delivery may make thousands of attempts.
        wait = min(self.first * 2.0 ** min(attempts - 1, 64), self.most)
        return wait * (1 + self.jitter * random())  # noqa: S311 - spreads load, protects nothing


class NoReporter:
    """A reporter that delivers no outcomes: the default if requests cannot name a receiver."""

    def pack(self, rollout: Rollout, target: Target, key: str) -> bytes:
        """Return no bytes."""
        return b""

    async def deliver(self, packed: PackedOutcome) -> Receipt:
        """Refuse permanently, so that the delivery is not retried."""
        return DeliveryRefused("this server does not deliver outcomes")


@dataclass(frozen=True, slots=True)
class RegistryDependencies:
    """Clock, observer, tracer, reporter of outcomes with its retry policy, resources of tools (None: defaults), further models.

    `model_access`, `later_system` and `count_tool` are for the model endpoints of rollouts (`CapturePorts`). `resume_by_default`:
    unfinished rollouts whose `on_interrupt` is unset are continued after a restart.
    """

    clock: Clock = Clock()
    observer: Observer = field(default_factory=NoObserver)
    reporter: Reporter = field(default_factory=NoReporter)
    retry_policy: DeliveryRetryPolicy = DeliveryRetryPolicy()
    tool_resources: ToolResources | None = None
    models: FurtherModels = field(default_factory=NoFurtherModels)
    model_access: Callable[[str], ModelAccess] = no_model_access
    later_system: Callable[[Spec], Awaitable[LaterSystem]] = no_later_system
    count_tool: Callable[[AgentProtocol, str, bool, float], None] = count_nothing
    journal: Journal = field(default_factory=MemoryJournal)
    resume_by_default: bool = True
    tracer: Tracer = field(default_factory=NoTracer)


def by_name(agents: Sequence[AgentProtocol]) -> Mapping[str, AgentProtocol]:
    """Return the agents by name. Raise ValueError if two have the same name; the text says where they are defined."""
    found: dict[str, AgentProtocol] = {}
    for agent in agents:
        if agent.name in found:
            locations = "; ".join(defined_at(type(each)) for each in agents if each.name == agent.name)
            raise ValueError(f"two agents have the name {agent.name!r}: {locations}")
        found[agent.name] = agent
    return found

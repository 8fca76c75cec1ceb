"""What a stream tells a trainer, and keeps until it was acknowledged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rollout_server.core.error import RolloutError
from rollout_server.edge.stream.stream_rollout import Errand, Seat, Way
from rollout_server.edge.wire import train as wire


@dataclass(frozen=True, slots=True)
class Started:
    """A rollout was accepted or found."""

    seat: Seat
    attached: bool

    def write(self, sequence: int) -> wire.Item:
        """As it is now."""
        return wire.started_item(sequence, self.seat.rollout, attached=self.attached)


@dataclass(frozen=True, slots=True)
class Refused:
    """A start or cancel was refused."""

    start_sequence: int
    error: RolloutError
    seat: None = None

    def write(self, sequence: int) -> wire.Item:
        """The same each time."""
        return wire.refused_item(sequence, self.start_sequence, self.error)


@dataclass(frozen=True, slots=True)
class Asked:
    """A completion is asked for."""

    errand: Errand
    seat: Seat
    stream: Way

    def write(self, sequence: int) -> wire.Item:
        """The ask, for as long as it is under way here."""
        here = self.seat.stream is self.stream and self.errand.sent == sequence
        return wire.ask_item(sequence, self.errand.request if here and not self.errand.answer.done() else None)


@dataclass(frozen=True, slots=True)
class Over:
    """A rollout ended."""

    seat: Seat

    def write(self, sequence: int) -> wire.Item:
        """Its outcome."""
        return wire.outcome_item(sequence, self.seat.rollout)


Content: TypeAlias = "Started | Refused | Asked | Over"


@dataclass(frozen=True, slots=True)
class Kept:
    """One that was sent. `told` are the events of its rollout that went before it."""

    sequence: int
    content: Content
    told: int

"""What a stream tells a trainer, and keeps until it was acknowledged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rollout_server.core.error import RolloutError
from rollout_server.edge.stream.stream_rollout import PendingCompletion, RolloutStream, StreamRollout
from rollout_server.edge.wire import train as wire


@dataclass(frozen=True, slots=True)
class StartedItem:
    """A rollout was accepted or found."""

    seat: StreamRollout
    attached: bool

    def write(self, sequence: int) -> wire.Item:
        """As it is now."""
        return wire.started_item(sequence, self.seat.rollout, attached=self.attached)


@dataclass(frozen=True, slots=True)
class RefusedItem:
    """A start or cancel was refused."""

    start_sequence: int
    error: RolloutError
    seat: None = None

    def write(self, sequence: int) -> wire.Item:
        """The same each time."""
        return wire.refused_item(sequence, self.start_sequence, self.error)


@dataclass(frozen=True, slots=True)
class CompletionItem:
    """A completion is asked for."""

    errand: PendingCompletion
    seat: StreamRollout
    stream: RolloutStream

    def write(self, sequence: int) -> wire.Item:
        """The ask, for as long as it is under way here."""
        here = self.seat.stream is self.stream and self.errand.sent == sequence
        return wire.ask_item(sequence, self.errand.request if here and not self.errand.answer.done() else None)


@dataclass(frozen=True, slots=True)
class OutcomeItem:
    """A rollout ended."""

    seat: StreamRollout

    def write(self, sequence: int) -> wire.Item:
        """Its outcome."""
        return wire.outcome_item(sequence, self.seat.rollout)


Content: TypeAlias = "StartedItem | RefusedItem | CompletionItem | OutcomeItem"


@dataclass(frozen=True, slots=True)
class UnacknowledgedItem:
    """One that was sent. `told` are the events of its rollout that went before it."""

    sequence: int
    content: Content
    told: int

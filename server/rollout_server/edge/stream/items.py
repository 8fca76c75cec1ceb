"""What a stream tells a trainer, and keeps until it was acknowledged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rollout_server.core.error import RolloutError
from rollout_server.edge.stream.pending_requests import PendingCompletion
from rollout_server.edge.stream.stream_rollout import RolloutStream, StreamRollout
from rollout_server.edge.wire import train as wire


@dataclass(frozen=True, slots=True)
class StartedItem:
    """A rollout was accepted or found."""

    stream_rollout: StreamRollout
    attached: bool

    def write(self, sequence: int) -> wire.Item:
        """As it is now."""
        return wire.started_item(sequence, self.stream_rollout.rollout, attached=self.attached)


@dataclass(frozen=True, slots=True)
class RefusedItem:
    """A start or cancel was refused."""

    start_sequence: int
    error: RolloutError
    stream_rollout: None = None

    def write(self, sequence: int) -> wire.Item:
        """The same each time."""
        return wire.refused_item(sequence, self.start_sequence, self.error)


@dataclass(frozen=True, slots=True)
class CompletionItem:
    """A completion is asked for."""

    completion: PendingCompletion
    stream_rollout: StreamRollout
    stream: RolloutStream

    def write(self, sequence: int) -> wire.Item:
        """The request, for as long as it is under way here."""
        here = self.stream_rollout.stream is self.stream and self.completion.sent == sequence
        return wire.completion_item(
            sequence, self.completion.request if here and not self.completion.response.done() else None
        )


@dataclass(frozen=True, slots=True)
class OutcomeItem:
    """Tells the trainer that a rollout has ended, and how."""

    stream_rollout: StreamRollout

    def write(self, sequence: int) -> wire.Item:
        """The item with the outcome."""
        return wire.outcome_item(sequence, self.stream_rollout.rollout)


Content: TypeAlias = "StartedItem | RefusedItem | CompletionItem | OutcomeItem"


@dataclass(frozen=True, slots=True)
class UnacknowledgedItem:
    """One that was sent. `sent_events` are the events of its rollout that went before it."""

    sequence: int
    content: Content
    sent_events: int

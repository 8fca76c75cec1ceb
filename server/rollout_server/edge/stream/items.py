"""Items that a stream sends to its trainer and keeps until they are acknowledged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rollout_server.core.error import RolloutError
from rollout_server.edge.stream.pending_requests import PendingCompletion
from rollout_server.edge.stream.stream_rollout import RolloutStream, StreamRollout
from rollout_server.edge.wire import train as wire


@dataclass(frozen=True, slots=True)
class StartedItem:
    """A rollout was started or found."""

    stream_rollout: StreamRollout
    attached: bool

    def write(self, sequence: int) -> wire.Item:
        """Return the item with the rollout's current state."""
        return wire.started_item(sequence, self.stream_rollout.rollout, attached=self.attached)


@dataclass(frozen=True, slots=True)
class RefusedItem:
    """A start, cancel or policy was refused."""

    start_sequence: int
    error: RolloutError
    stream_rollout: None = None

    def write(self, sequence: int) -> wire.Item:
        """Return the item, the same each time."""
        return wire.refused_item(sequence, self.start_sequence, self.error)


@dataclass(frozen=True, slots=True)
class CompletionItem:
    """A request for a completion."""

    completion: PendingCompletion
    stream_rollout: StreamRollout
    stream: RolloutStream

    def write(self, sequence: int) -> wire.Item:
        """Return the item; its request is left out if this stream does not need the completion any more."""
        # A repeated item keeps its sequence number. The completion may have a response, or the rollout may be on another stream.
        here = self.stream_rollout.stream is self.stream and self.completion.sent == sequence
        request = self.completion.request if here and not self.completion.response.done() else None
        if request is not None:
            self.completion.call.update(request)
        return wire.completion_item(sequence, request)


@dataclass(frozen=True, slots=True)
class OutcomeItem:
    """The outcome of a rollout."""

    stream_rollout: StreamRollout

    def write(self, sequence: int) -> wire.Item:
        """Return the item with the outcome."""
        return wire.outcome_item(sequence, self.stream_rollout.rollout)


Content: TypeAlias = "StartedItem | RefusedItem | CompletionItem | OutcomeItem"


@dataclass(frozen=True, slots=True)
class UnacknowledgedItem:
    """An item that was sent. `sent_events` is the number of its rollout's events that were sent before it."""

    sequence: int
    content: Content
    sent_events: int

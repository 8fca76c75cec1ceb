"""One stream of a trainer: items to send, items sent but not acknowledged, and pending requests."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from rollout_server.core.error import InvalidRequest, RolloutError, Violation
from rollout_server.core.outcome import Cancellation
from rollout_server.edge.stream.acknowledgement import Acknowledgement
from rollout_server.edge.stream.completion_queue import PendingCompletions
from rollout_server.edge.stream.idle import IdleSignal
from rollout_server.edge.stream.items import (
    CompletionItem,
    Content,
    OutcomeItem,
    RefusedItem,
    StartedItem,
    UnacknowledgedItem,
)
from rollout_server.edge.stream.pending_requests import LedgerRead, LedgerReads, PendingCompletion
from rollout_server.edge.stream.stream_rollout import StreamRollout
from rollout_server.edge.trainer.grpc_client import Rejection
from rollout_server.edge.wire import train as wire
from rollout_server.edge.wire.completion import Response
from rollout_server.runtime.policy import AnnouncedPolicy, PolicyUpdate
from rollout_server.runtime.rollout import Rollout

CLOSED = Cancellation("the trainer closed its stream")


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Limits of streams. Times in seconds.

    Args:
        grace: how long a disconnected stream can be resumed.
        timeout: how long a completion may take.
        streams, of_caller: concurrent streams, in total and per caller, including disconnected ones.
        rollouts: rollouts of one stream whose outcomes are not acknowledged.
        unacknowledged: items that were sent and not acknowledged. The same number of refusals may wait to be sent.
    """

    grace: float = 30.0
    timeout: float = 300.0
    streams: int = 1000
    of_caller: int = 100
    rollouts: int = 10_000
    unacknowledged: int = 1024


class TrainerStream:
    """A stream. Lives on one event loop, over any number of connections.

    Every item with a sequence number is kept until it is acknowledged. After a reconnection the kept items are sent again in
    the same order. Events have no acknowledgement of their own: acknowledging an item confirms the events of its rollout that
    were sent before it, so an outcome confirms all events.

    Args:
        received: the trainer's items that were processed, and their acknowledgement.
        detail: detail of the events that are sent; 0: no events.
        connected: whether the trainer is connected.
        closed: the trainer has closed the stream and acknowledges nothing any more.
        starting: a group of rollouts is being started.
        refusals: refusals that are not sent yet.
        policy: what the trainer announced for the rollouts of the stream.
        leaving: the error that ends the stream once everything is delivered; None: the stream continues.
    """

    def __init__(self, stream_id: str, caller: str, limits: StreamLimits) -> None:
        self.id = stream_id
        self.caller = caller
        self.limits = limits
        self.received = Acknowledgement(self.wake)
        self.completions = PendingCompletions()
        self.detail = 0
        self.connected = False
        self.closed = False
        self.starting = False
        self.refusals = 0
        self.policy = AnnouncedPolicy()
        self.leaving: RolloutError | None = None
        self.rollouts: dict[str, StreamRollout] = {}
        self._sent = self._last_completion = 0
        self._acknowledged = 0
        self._kept: deque[UnacknowledgedItem] = deque()
        self._again: deque[UnacknowledgedItem] = deque()
        self._replies: deque[StartedItem | RefusedItem] = deque()
        self._active: OrderedDict[StreamRollout, None] = OrderedDict()
        self._finished: OrderedDict[StreamRollout, None] = OrderedDict()
        self.ledger_reads = LedgerReads()
        self.idle = IdleSignal(self.wake)
        self._busy: StreamRollout | None = None
        self._wake = asyncio.Event()

    @property
    def seen(self) -> int:
        """The trainer's last sequence number that was processed."""
        return self.received.seen

    @property
    def replies(self) -> int:
        """Number of replies to starts and of refusals that are not sent yet."""
        return len(self._replies)

    @property
    def has_undelivered(self) -> bool:
        """Whether something has to be sent or acknowledged. On a closed stream sending is enough: nothing is acknowledged there."""
        left = (
            self.rollouts
            if not self.closed
            else [stream_rollout for stream_rollout in self.rollouts.values() if not stream_rollout.delivered]
        )
        return bool(left or self._replies)

    def check(self, last_seen: int) -> None:
        """Raise `InvalidRequest` for an impossible `last_seen`."""
        if not self._acknowledged <= last_seen <= self._sent:
            text = f"is {last_seen}, but it must be from {self._acknowledged} (last acknowledged) to {self._sent} (last sent)"
            raise InvalidRequest(Violation("hello.last_seen", text))

    def connect(self) -> wire.Item:
        """Mark the trainer as connected, and prepare to repeat unacknowledged items and unconfirmed events.

        Returns the first item to send.
        """
        self.ledger_reads.fail()
        self.idle.reset()
        self.received.reset()  # the welcome acknowledges them
        self._again = deque(self._kept)
        self.connected = True
        for stream_rollout in self.rollouts.values():
            stream_rollout.sent_events = stream_rollout.confirmed_events
            stream_rollout.attach()
            self._active[stream_rollout] = None
        self.wake()
        return wire.welcome(self.id, self.seen, self.limits.grace)

    def disconnect(self) -> None:
        """Mark the trainer as disconnected."""
        self.connected = False
        for stream_rollout in self.rollouts.values():
            stream_rollout.detach()

    def close(self) -> None:
        """End the stream for the trainer: cancel its running rollouts and send their outcomes once."""
        self.closed = True
        self._kept.clear()
        for stream_rollout in self.rollouts.values():
            stream_rollout.rollout.ending.request(CLOSED)
        self.wake()

    def acknowledge(self, sequence: int) -> Sequence[Rollout]:
        """Drop the items up to this sequence number. Return the rollouts whose outcomes were among them.

        Raises `InvalidRequest` for a number that was not sent yet.
        """
        if sequence > self._sent:
            text = f"is {sequence}, but the last item sent is {self._sent}"
            raise InvalidRequest(Violation("acknowledge.sequence", text))
        self._acknowledged = max(self._acknowledged, sequence)
        received, was_full = [], len(self._kept) >= self.limits.unacknowledged
        while self._kept and self._kept[0].sequence <= sequence:
            kept = self._kept.popleft()
            stream_rollout = kept.content.stream_rollout
            if stream_rollout is None or stream_rollout.stream is not self:
                continue
            stream_rollout.confirmed_events = max(stream_rollout.confirmed_events, kept.sent_events)
            if isinstance(kept.content, OutcomeItem):
                self.leave(stream_rollout)
                received.append(stream_rollout.rollout)
        if was_full:
            self.wake()
        return received

    def add(self, stream_rollout: StreamRollout) -> None:
        """Add a rollout. It is announced to the trainer by a later reply."""
        self.rollouts[stream_rollout.rollout.uid] = stream_rollout
        stream_rollout.rollout.announce(self.policy)
        if self.connected:
            stream_rollout.attach()

    def announce(self, update: PolicyUpdate) -> None:
        """Apply the trainer's announcement to the stream's rollouts, also to later ones. Raise `InvalidRequest`."""
        self.policy = self.policy.updated(update)
        for stream_rollout in self.rollouts.values():
            stream_rollout.rollout.announce(self.policy)
        self.wake()

    def leave(self, stream_rollout: StreamRollout) -> None:
        """Remove a rollout."""
        self.rollouts.pop(stream_rollout.rollout.uid, None)
        self._active.pop(stream_rollout, None)
        self._finished.pop(stream_rollout, None)
        self.completions.leave(stream_rollout)
        stream_rollout.detach()
        self.wake()

    def reply(self, reply: StartedItem | RefusedItem) -> None:
        """Queue the reply to a start, or the refusal of another item."""
        self._replies.append(reply)
        self.refusals += isinstance(reply, RefusedItem)
        self.wake()

    def respond(self, turn_key: str, response: Response | Rejection) -> bool:
        """Pass on the trainer's response. Return False if the completion is not requested."""
        is_requested = self.completions.respond(turn_key, response)
        self._on_credit()
        return is_requested

    def queue(self, stream_rollout: StreamRollout) -> None:
        """See `RolloutStream`."""
        # A trainer must learn of a rollout before it gets requests for it. `_reply` queues the others when it announces them.
        if stream_rollout.announced:
            self.completions.queue(stream_rollout)
            self.wake()

    def release(self, completion: PendingCompletion) -> None:
        """See `RolloutStream`."""
        self.completions.release(completion)
        self._on_credit()

    def log_grew(self, stream_rollout: StreamRollout) -> None:
        """See `RolloutStream`."""
        self._active[stream_rollout] = None
        self.wake()

    def queue_read(self, ledger_read: LedgerRead) -> None:
        """See `RolloutStream`."""
        self.ledger_reads.add(ledger_read)
        self.wake()

    def drop_read(self, ledger_read: LedgerRead) -> None:
        """See `RolloutStream`."""
        self.ledger_reads.drop(ledger_read)

    def on_activity(self) -> None:
        """See `RolloutStream`."""
        if self.idle.wanted:
            self.idle.restart()
            self.wake()

    def _on_credit(self) -> None:
        """Wake the sender if another completion can be requested now, and if it decides whether the stream is idle."""
        if self.completions.can_request or self.idle.wanted:
            self.wake()

    def wake(self) -> None:
        """Wake the sender: there may be something to send."""
        self._wake.set()

    async def wait_for_items(self) -> None:
        """Wait until there may be something to send.

        The event is cleared before the caller looks for items, so a `wake` during that look-up is not lost.
        """
        await self._wake.wait()
        self._wake.clear()

    def next(self) -> wire.Item | None:
        """Return the next item to send; None if there is none.

        Order: repeated items, acknowledgements, replies, completions, outcomes, ledger reads, events, idle. An outcome is queued
        only after all events of its rollout were sent.
        """
        item = self._repeat()
        if item is not None:
            return item
        at_once = self.idle.wanted or self.closed or self.leaving is not None
        sequence = self.received.next(at_once=at_once)
        if sequence is not None:
            return wire.acknowledge_item(sequence)
        if self.closed or len(self._kept) < self.limits.unacknowledged:
            content = self._reply() or self._completion() or self._outcome()
            if content is not None:
                return self._keep(content)
        ledger_read = self.ledger_reads.next()
        if ledger_read is not None:
            return wire.ledger_item(ledger_read.uid, ledger_read.segment_id)
        return self._event() or self._idle()

    def _repeat(self) -> wire.Item | None:
        """Return the next item that may not have arrived, in the original order."""
        while self._again:
            kept = self._again[0]
            stream_rollout = kept.content.stream_rollout
            if kept.sequence > self._acknowledged:
                if stream_rollout is not None and stream_rollout.stream is self:
                    # First the events that were sent before this item: the trainer sees events and items in the original order.
                    item = self._event_of(stream_rollout, kept.sent_events)
                    if item is not None:
                        return item
                self._again.popleft()
                return kept.content.write(kept.sequence)
            self._again.popleft()
        return None

    def _keep(self, content: Content) -> wire.Item:
        self._sent += 1
        if isinstance(content, CompletionItem):
            content.completion.send(self._sent, self.limits.timeout)
            self._last_completion = self._sent
        if not self.closed:
            sent_events = content.stream_rollout.sent_events if content.stream_rollout is not None else 0
            self._kept.append(UnacknowledgedItem(self._sent, content, sent_events))
        return content.write(self._sent)

    def _reply(self) -> Content | None:
        if not self._replies:
            return None
        reply = self._replies.popleft()
        self.refusals -= isinstance(reply, RefusedItem)
        if isinstance(reply, StartedItem):
            stream_rollout = reply.stream_rollout
            if stream_rollout.stream is self and not stream_rollout.announced:
                stream_rollout.announced = True
                self._active[stream_rollout] = None
                if stream_rollout.next_unsent() is not None:
                    self.completions.queue(stream_rollout)
        return reply

    def _completion(self) -> Content | None:
        found = self.completions.next() if not (self.closed or self.policy.paused) else None
        return CompletionItem(*found, self) if found is not None else None

    def _outcome(self) -> Content | None:
        if not self._finished:
            return None
        stream_rollout, _ = self._finished.popitem(last=False)
        stream_rollout.delivered = True
        return OutcomeItem(stream_rollout)

    def _event(self) -> wire.Item | None:
        """Return the next event, from the rollouts in turn. A finished rollout without further events is queued for its outcome."""
        while self._active:
            stream_rollout, _ = self._active.popitem(last=False)
            if not stream_rollout.announced:
                continue
            item = self._event_of(stream_rollout, stream_rollout.rollout.log.last_sequence)
            if item is not None:
                self._active[stream_rollout] = None
                return item
            if stream_rollout.rollout.outcome is not None and not stream_rollout.delivered:
                self._finished[stream_rollout] = None
                self.wake()  # `next` looked for outcomes before it called this method
        return None

    def _idle(self) -> wire.Item | None:
        at_once = self.policy.paused or not self.completions.has_credit
        due = self.idle.is_due((self._sent, self.seen), self._is_idle, at_once=at_once)
        return wire.idle_item(self._last_completion) if due else None

    def _is_idle(self) -> bool:
        """Return whether no completion can be requested before the trainer responds to one that it has.

        Called when there is nothing else to send. Then completions wait only for credit, or for acknowledgements.
        """
        if self.closed or not len(self.completions) or len(self._kept) >= self.limits.unacknowledged:
            return False
        if self.policy.paused or not self.completions.has_credit:
            return True
        busy = self._busy  # looked at first: most often it is still busy
        if self.starting or (busy is not None and busy.stream is self and not busy.rollout.is_blocked):
            return False
        self._busy = next((each for each in self.rollouts.values() if not each.rollout.is_blocked), None)
        return self._busy is None

    def _event_of(self, stream_rollout: StreamRollout, until: int) -> wire.Item | None:
        """Return a rollout's next event up to this number, skipping events below the requested detail."""
        while stream_rollout.sent_events < until:
            entry = stream_rollout.rollout.log.entries[stream_rollout.sent_events]
            stream_rollout.sent_events += 1
            item = wire.event_item(stream_rollout.rollout, entry, self.detail)
            if item is not None:
                return item
        return None

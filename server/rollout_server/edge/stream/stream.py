"""One stream of a trainer: what is to be told, what was told and not acknowledged, and what is under way."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from rollout_server.core.error import InvalidRequest, RolloutError, Violation
from rollout_server.core.outcome import Cancellation
from rollout_server.edge.stream.completion_queue import PendingCompletions
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
from rollout_server.runtime.rollout import Rollout

CLOSED = Cancellation("the trainer closed its stream")


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Times in seconds.

    Args:
        grace: how long a cut stream is kept.
        timeout: how long a completion may stay unanswered.
        streams, of_caller: streams at the same time, in all and of one caller, the cut ones among them.
        rollouts: rollouts of one stream whose outcomes are not acknowledged.
        unacknowledged: items with a sequence that were sent and not acknowledged; so many refusals may wait to be sent as well.
    """

    grace: float = 30.0
    timeout: float = 300.0
    streams: int = 1000
    of_caller: int = 100
    rollouts: int = 10_000
    unacknowledged: int = 1024


class TrainerStream:
    """Lives on one event loop, over as many connections as it takes.

    Args:
        seen: the last sequence of the trainer that was taken.
        detail: how much of each event is sent; 0: none.
        connected: a trainer is there.
        closed: the trainer is done and acknowledges nothing any more.
        refusals: those that wait to be sent.
        leaving: how the stream ends once nothing is owed; None: it goes on.
    """

    def __init__(self, stream_id: str, caller: str, limits: StreamLimits) -> None:
        self.id = stream_id
        self.caller = caller
        self.limits = limits
        self.seen = 0
        self.completions = PendingCompletions()
        self.detail = 0
        self.connected = False
        self.closed = False
        self.refusals = 0
        self.leaving: RolloutError | None = None
        self.rollouts: dict[str, StreamRollout] = {}
        self._sent = 0
        self._acknowledged = 0
        self._acknowledged_seen = 0
        self._kept: deque[UnacknowledgedItem] = deque()
        self._again: deque[UnacknowledgedItem] = deque()
        self._replies: deque[StartedItem | RefusedItem] = deque()
        self._active: OrderedDict[StreamRollout, None] = OrderedDict()
        self._finished: OrderedDict[StreamRollout, None] = OrderedDict()
        self.ledger_reads = LedgerReads()
        self._wake = asyncio.Event()

    @property
    def replies(self) -> int:
        """Starts and refusals that wait to be told."""
        return len(self._replies)

    @property
    def has_undelivered(self) -> bool:
        """Something is to be sent, or was sent and not acknowledged; once the trainer is done, it acknowledges no more."""
        left = (
            self.rollouts
            if not self.closed
            else [stream_rollout for stream_rollout in self.rollouts.values() if not stream_rollout.delivered]
        )
        return bool(left or self._replies)

    def check(self, last_seen: int) -> None:
        """Raises `InvalidRequest` for a last item seen that cannot be."""
        if not self._acknowledged <= last_seen <= self._sent:
            text = f"is {last_seen}; items up to {self._acknowledged} were acknowledged, and {self._sent} was the last one sent"
            raise InvalidRequest(Violation("hello.last_seen", text))

    def connect(self) -> wire.Item:
        """A trainer is there: what was not acknowledged is sent again, and the events that may not have arrived.

        Returns what is sent first.
        """
        self.ledger_reads.fail()
        self._acknowledged_seen = self.seen
        self._again = deque(self._kept)
        self.connected = True
        for stream_rollout in self.rollouts.values():
            stream_rollout.sent_events = stream_rollout.confirmed_events
            stream_rollout.attach()
            self._active[stream_rollout] = None
        self.wake()
        return wire.welcome(self.id, self.seen, self.limits.grace)

    def disconnect(self) -> None:
        """The trainer is away."""
        self.connected = False
        for stream_rollout in self.rollouts.values():
            stream_rollout.detach()

    def close(self) -> None:
        """The trainer is done: what still runs is cancelled, and what is owed is sent, once."""
        self.closed = True
        self._kept.clear()
        for stream_rollout in self.rollouts.values():
            stream_rollout.rollout.ending.request(CLOSED)
        self.wake()

    def acknowledge(self, sequence: int) -> Sequence[Rollout]:
        """Lets go of the items up to this one. Returns the rollouts whose outcomes were among them.

        Raises `InvalidRequest` for one that was never sent.
        """
        if sequence > self._sent:
            text = f"is {sequence}, and nothing after {self._sent} was sent"
            raise InvalidRequest(Violation("acknowledge.sequence", text))
        self._acknowledged = max(self._acknowledged, sequence)
        received = []
        while self._kept and self._kept[0].sequence <= sequence:
            kept = self._kept.popleft()
            stream_rollout = kept.content.stream_rollout
            if stream_rollout is None or stream_rollout.stream is not self:
                continue
            stream_rollout.confirmed_events = max(stream_rollout.confirmed_events, kept.sent_events)
            if isinstance(kept.content, OutcomeItem):
                self.leave(stream_rollout)
                received.append(stream_rollout.rollout)
        self.wake()
        return received

    def add(self, stream_rollout: StreamRollout) -> None:
        """A rollout is on this stream from here on. It is not announced yet."""
        self.rollouts[stream_rollout.rollout.uid] = stream_rollout
        if self.connected:
            stream_rollout.attach()

    def leave(self, stream_rollout: StreamRollout) -> None:
        """It is here no more."""
        self.rollouts.pop(stream_rollout.rollout.uid, None)
        self._active.pop(stream_rollout, None)
        self._finished.pop(stream_rollout, None)
        self.completions.leave(stream_rollout)
        stream_rollout.detach()
        self.wake()

    def reply(self, reply: StartedItem | RefusedItem) -> None:
        """Tells what became of a start or cancel."""
        self._replies.append(reply)
        self.refusals += isinstance(reply, RefusedItem)
        self.wake()

    def respond(self, turn_key: str, response: Response | Rejection) -> bool:
        """Takes the response of the trainer. False: it is not under way."""
        self.wake()
        return self.completions.respond(turn_key, response)

    def queue(self, stream_rollout: StreamRollout) -> None:
        """As `RolloutStream`."""
        if stream_rollout.announced:
            self.completions.queue(stream_rollout)
            self.wake()

    def release(self, completion: PendingCompletion) -> None:
        """As `RolloutStream`."""
        self.completions.release(completion)
        self.wake()

    def log_grew(self, stream_rollout: StreamRollout) -> None:
        """As `RolloutStream`."""
        self._active[stream_rollout] = None
        self.wake()

    def queue_read(self, ledger_read: LedgerRead) -> None:
        """As `RolloutStream`."""
        self.ledger_reads.add(ledger_read)
        self.wake()

    def drop_read(self, ledger_read: LedgerRead) -> None:
        """As `RolloutStream`."""
        self.ledger_reads.drop(ledger_read)

    def wake(self) -> None:
        """There may be something to send."""
        self._wake.set()

    async def wait_for_items(self) -> None:
        """Waits until there may be something to send."""
        await self._wake.wait()
        self._wake.clear()

    def next(self) -> wire.Item | None:
        """What is to be sent now; None: nothing is."""
        item = self._repeat()
        if item is not None:
            return item
        if self._acknowledged_seen != self.seen:
            self._acknowledged_seen = self.seen
            return wire.acknowledge_item(self.seen)
        if self.closed or len(self._kept) < self.limits.unacknowledged:
            content = self._reply() or self._completion() or self._outcome()
            if content is not None:
                return self._keep(content)
        ledger_read = self.ledger_reads.next()
        return wire.ledger_item(ledger_read.uid, ledger_read.segment_id) if ledger_read is not None else self._event()

    def _repeat(self) -> wire.Item | None:
        """What was sent before and may not have arrived, in the same order."""
        while self._again:
            kept = self._again[0]
            stream_rollout = kept.content.stream_rollout
            if kept.sequence > self._acknowledged:
                if stream_rollout is not None and stream_rollout.stream is self:
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
        found = self.completions.next() if not self.closed else None
        return CompletionItem(*found, self) if found is not None else None

    def _outcome(self) -> Content | None:
        if not self._finished:
            return None
        stream_rollout, _ = self._finished.popitem(last=False)
        stream_rollout.delivered = True
        return OutcomeItem(stream_rollout)

    def _event(self) -> wire.Item | None:
        """The next event of the rollouts in turn; one that has told all of them and is over has its outcome to tell."""
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
                self.wake()
        return None

    def _event_of(self, stream_rollout: StreamRollout, until: int) -> wire.Item | None:
        """The next event of a rollout, up to this one, in as much detail as is wanted."""
        while stream_rollout.sent_events < until:
            entry = stream_rollout.rollout.log.entries[stream_rollout.sent_events]
            stream_rollout.sent_events += 1
            item = wire.event_item(stream_rollout.rollout, entry, self.detail)
            if item is not None:
                return item
        return None

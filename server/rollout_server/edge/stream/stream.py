"""One stream of a trainer: what is to be told, what was told and not acknowledged, and what is under way."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from rollout_server.core.error import InvalidRequest, RolloutError, Violation
from rollout_server.core.outcome import Cancellation
from rollout_server.edge.stream.items import (
    CompletionItem,
    Content,
    OutcomeItem,
    RefusedItem,
    StartedItem,
    UnacknowledgedItem,
)
from rollout_server.edge.stream.ledger_reads import LedgerReads
from rollout_server.edge.stream.pending_completions import PendingCompletions
from rollout_server.edge.stream.stream_rollout import LedgerRead, PendingCompletion, StreamRollout
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
        timeout: how long an ask that was sent may stay unanswered.
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
        self.asks = PendingCompletions()
        self.detail = 0
        self.connected = False
        self.closed = False
        self.refusals = 0
        self.leaving: RolloutError | None = None
        self.seats: dict[str, StreamRollout] = {}
        self._sent = 0
        self._acknowledged = 0
        self._told_seen = 0
        self._kept: deque[UnacknowledgedItem] = deque()
        self._again: deque[UnacknowledgedItem] = deque()
        self._replies: deque[StartedItem | RefusedItem] = deque()
        self._stirring: OrderedDict[StreamRollout, None] = OrderedDict()
        self._finished: OrderedDict[StreamRollout, None] = OrderedDict()
        self.readings = LedgerReads()
        self._wake = asyncio.Event()

    @property
    def replies(self) -> int:
        """Starts and refusals that wait to be told."""
        return len(self._replies)

    @property
    def owes(self) -> bool:
        """Something is to be told, or was told and not acknowledged; once the trainer is done, it acknowledges no more."""
        left = self.seats if not self.closed else [seat for seat in self.seats.values() if not seat.delivered]
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
        self.readings.lose()
        self._told_seen = self.seen
        self._again = deque(self._kept)
        self.connected = True
        for seat in self.seats.values():
            seat.told = seat.arrived
            seat.attach()
            self._stirring[seat] = None
        self.stir()
        return wire.welcome(self.id, self.seen, self.limits.grace)

    def disconnect(self) -> None:
        """The trainer is away."""
        self.connected = False
        for seat in self.seats.values():
            seat.detach()

    def close(self) -> None:
        """The trainer is done: what still runs is cancelled, and what is owed is sent, once."""
        self.closed = True
        self._kept.clear()
        for seat in self.seats.values():
            seat.rollout.ask_to_end(CLOSED)
        self.stir()

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
            seat = kept.content.seat
            if seat is None or seat.stream is not self:
                continue
            seat.arrived = max(seat.arrived, kept.told)
            if isinstance(kept.content, OutcomeItem):
                self.leave(seat)
                received.append(seat.rollout)
        self.stir()
        return received

    def sit(self, seat: StreamRollout) -> None:
        """A rollout is on this stream from here on. It is not announced yet."""
        self.seats[seat.rollout.uid] = seat
        if self.connected:
            seat.attach()

    def leave(self, seat: StreamRollout) -> None:
        """It is here no more."""
        self.seats.pop(seat.rollout.uid, None)
        self._stirring.pop(seat, None)
        self._finished.pop(seat, None)
        self.asks.leave(seat)
        seat.detach()
        self.stir()

    def reply(self, reply: StartedItem | RefusedItem) -> None:
        """Tells what became of a start or cancel."""
        self._replies.append(reply)
        self.refusals += isinstance(reply, RefusedItem)
        self.stir()

    def answered(self, turn_key: str, said: Response | Rejection) -> bool:
        """Takes what the trainer says to an ask. False: it is not under way."""
        self.stir()
        return self.asks.answered(turn_key, said)

    def want(self, seat: StreamRollout) -> None:
        """As `RolloutStream`."""
        if seat.announced:
            self.asks.want(seat)
            self.stir()

    def over(self, errand: PendingCompletion) -> None:
        """As `RolloutStream`."""
        self.asks.over(errand)
        self.stir()

    def look(self, seat: StreamRollout) -> None:
        """As `RolloutStream`."""
        self._stirring[seat] = None
        self.stir()

    def show(self, reading: LedgerRead) -> None:
        """As `RolloutStream`."""
        self.readings.add(reading)
        self.stir()

    def hide(self, reading: LedgerRead) -> None:
        """As `RolloutStream`."""
        self.readings.drop(reading)

    def stir(self) -> None:
        """There may be something to send."""
        self._wake.set()

    async def stirred(self) -> None:
        """Waits until there may be something to send."""
        await self._wake.wait()
        self._wake.clear()

    def next(self) -> wire.Item | None:
        """What is to be sent now; None: nothing is."""
        item = self._repeat()
        if item is not None:
            return item
        if self._told_seen != self.seen:
            self._told_seen = self.seen
            return wire.acknowledge_item(self.seen)
        if self.closed or len(self._kept) < self.limits.unacknowledged:
            content = self._reply() or self._ask() or self._outcome()
            if content is not None:
                return self._keep(content)
        reading = self.readings.next()
        return wire.ledger_item(reading.uid, reading.segment_id) if reading is not None else self._event()

    def _repeat(self) -> wire.Item | None:
        """What was sent before and may not have arrived, in the same order."""
        while self._again:
            kept = self._again[0]
            seat = kept.content.seat
            if kept.sequence > self._acknowledged:
                if seat is not None and seat.stream is self:
                    item = self._event_of(seat, kept.told)
                    if item is not None:
                        return item
                self._again.popleft()
                return kept.content.write(kept.sequence)
            self._again.popleft()
        return None

    def _keep(self, content: Content) -> wire.Item:
        self._sent += 1
        if isinstance(content, CompletionItem):
            content.errand.send(self._sent, self.limits.timeout)
        if not self.closed:
            told = content.seat.told if content.seat is not None else 0
            self._kept.append(UnacknowledgedItem(self._sent, content, told))
        return content.write(self._sent)

    def _reply(self) -> Content | None:
        if not self._replies:
            return None
        reply = self._replies.popleft()
        self.refusals -= isinstance(reply, RefusedItem)
        if isinstance(reply, StartedItem):
            seat = reply.seat
            if seat.stream is self and not seat.announced:
                seat.announced = True
                self._stirring[seat] = None
                if seat.waiting() is not None:
                    self.asks.want(seat)
        return reply

    def _ask(self) -> Content | None:
        found = self.asks.next() if not self.closed else None
        return CompletionItem(*found, self) if found is not None else None

    def _outcome(self) -> Content | None:
        if not self._finished:
            return None
        seat, _ = self._finished.popitem(last=False)
        seat.delivered = True
        return OutcomeItem(seat)

    def _event(self) -> wire.Item | None:
        """The next event of the rollouts in turn; one that has told all of them and is over has its outcome to tell."""
        while self._stirring:
            seat, _ = self._stirring.popitem(last=False)
            if not seat.announced:
                continue
            item = self._event_of(seat, seat.rollout.log.last_sequence)
            if item is not None:
                self._stirring[seat] = None
                return item
            if seat.rollout.outcome is not None and not seat.delivered:
                self._finished[seat] = None
                self.stir()
        return None

    def _event_of(self, seat: StreamRollout, until: int) -> wire.Item | None:
        """The next event of a rollout, up to this one, in as much detail as is wanted."""
        while seat.told < until:
            entry = seat.rollout.log.entries[seat.told]
            seat.told += 1
            item = wire.event_item(seat.rollout, entry, self.detail)
            if item is not None:
                return item
        return None

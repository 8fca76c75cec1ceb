"""Takes what trainers send: every item once, in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from rollout_server.core.error import Busy, Draining, InvalidRequest, NotFound, RolloutError, Violation
from rollout_server.core.outcome import Cancellation
from rollout_server.edge.rpc.wire import request as requests
from rollout_server.edge.rpc.wire import train as wire
from rollout_server.edge.stream.content import Refused, Started
from rollout_server.edge.stream.seat import Seat
from rollout_server.edge.stream.stream import CLOSED, Stream
from rollout_server.edge.stream.streams import Streams
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.roster import Roster
from rollout_server.runtime.wish import Caller, Wish

_log = logging.getLogger(__name__)
NUMBERED = ("start", "answer", "reject", "cancel")
MOST_CREDIT = 1_000_000


class TooManyRefusals(Busy):
    """A trainer goes on with what is refused and does not take note of it."""

    reason = "TOO_MANY_REFUSALS"


class Desk:
    """`violations` is what this server may not do for a wish; it raises `NotPossible` for what it cannot do at all."""

    def __init__(self, roster: Roster, streams: Streams, violations: Callable[[Wish], Sequence[Violation]]) -> None:
        self.roster = roster
        self.streams = streams
        self._violations = violations
        self._groups: set[asyncio.Task[None]] = set()

    async def take(self, stream: Stream, given: wire.Given, caller: Caller) -> None:
        """Takes one item. Raises `InvalidRequest` for one that is out of order, `TooManyRefusals`: then it is not taken."""
        kind = given.WhichOneof("item")
        if kind in NUMBERED and not self._is_next(stream, kind, given.sequence):
            return
        if kind not in NUMBERED and given.sequence:
            raise InvalidRequest(Violation("sequence", f"is for {', '.join(NUMBERED)}; other items have none"))
        match kind:
            case "start":
                await self._begin(stream, given.start, caller)
            case "answer" | "reject":
                turn_key, said = wire.answer(given)
                if not stream.answered(turn_key, said):
                    _log.debug("an answer came to an ask that is not under way")
            case "cancel":
                self._cancel(stream, given.cancel, caller)
            case "acknowledge":
                self.acknowledge(stream, given.acknowledge.sequence, caller)
            case "credit":
                stream.asks.credit = min(MOST_CREDIT, stream.asks.credit + given.credit.asks)
                stream.stir()
            case "ledger":
                stream.readings.shown(given.ledger.uid, given.ledger.segment_id, partial(wire.ledger, given.ledger))
            case "hello":
                raise InvalidRequest(Violation("hello", "is the first item of a connection and comes once"))
            case _:
                raise InvalidRequest(Violation("item", "is unset, or of a kind that is not known here"))

    def acknowledge(self, stream: Stream, sequence: int, caller: Caller) -> None:
        """Items of the server came there; outcomes among them were received. Raises `InvalidRequest`."""
        for rollout in stream.acknowledge(sequence):
            self.streams.received(rollout)
            with suppress(NotFound):  # the roster may have forgotten it by now
                self.roster.acknowledge(rollout.uid, caller)

    def _is_next(self, stream: Stream, kind: str | None, sequence: int) -> bool:
        """Whether an item is to be taken, which it is noted to be; not one that was taken before."""
        if not sequence:
            raise InvalidRequest(Violation("sequence", f"is needed for `{kind}`: it counts up from 1"))
        if sequence <= stream.seen:
            return False
        if sequence != stream.seen + 1:
            text = f"is {sequence}, but {stream.seen + 1} comes next: items count up without gaps, over all connections of a stream"
            raise InvalidRequest(Violation("sequence", text))
        if kind in ("start", "cancel") and stream.refusals >= stream.limits.unacknowledged:
            text = f"{stream.refusals} refusals wait to be taken: read and acknowledge what the server sends"
            raise TooManyRefusals(text, retry_after=1.0)
        stream.seen = sequence
        stream.stir()
        return True

    def _cancel(self, stream: Stream, cancel: wire.Cancel, caller: Caller) -> None:
        try:
            if requests.is_empty(cancel.selection):
                raise InvalidRequest(Violation("selection", "is empty; set `all` to cancel all rollouts of yours"))
            if len(cancel.reason) > 1000:
                raise InvalidRequest(Violation("reason", "has at most 1000 characters"))
            selection = requests.selection(cancel.selection, Caller(caller.name))
            self.roster.cancel(selection, cancel.reason or "cancelled")
        except RolloutError as error:
            stream.reply(Refused(stream.seen, error))

    async def _begin(self, stream: Stream, start: wire.Start, caller: Caller) -> None:
        """Starts a group. A connection that breaks meanwhile does not leave half of one: the item was taken."""
        task = asyncio.create_task(self._start(stream, stream.seen, start, caller), name="start a group")
        self._groups.add(task)
        task.add_done_callback(self._groups.discard)
        await asyncio.shield(task)

    async def _start(self, stream: Stream, sequence: int, start: wire.Start, caller: Caller) -> None:
        try:
            wishes = wire.wishes(start, caller)
            self._check_room(stream, len(wishes))
            taken = await self._all_or_none(stream, wishes)
        except RolloutError as error:
            stream.reply(Refused(sequence, error))
            return
        for seat, attached in taken:
            stream.reply(Started(seat, attached))
        if stream.closed:
            for seat, _ in taken:
                seat.rollout.ask_to_end(CLOSED)
        if not self.streams.holds(stream):
            for seat, _ in taken:
                self.streams.stand(seat, "its stream ended while the rollout was started; start it again")

    def _check_room(self, stream: Stream, count: int) -> None:
        roster, capacity = self.roster, self.roster.capacity
        if roster.draining:
            raise Draining("the server is stopping and takes no new rollouts", retry_after=1.0)
        if len(stream.seats) + count > stream.limits.rollouts:
            text = (
                f"{len(stream.seats)} rollouts of this stream are not acknowledged, at most {stream.limits.rollouts} may be; "
                "acknowledge outcomes, or open another stream"
            )
            raise Busy(text, retry_after=1.0)
        if count > 1 and roster.running + roster.queued + count > capacity.running + capacity.queued:
            text = f"{roster.running} rollouts run and {roster.queued} wait: there is no room for {count} more; ask again later"
            raise Busy(text, retry_after=1.0)

    async def _all_or_none(self, stream: Stream, wishes: Sequence[Wish]) -> Sequence[tuple[Seat, bool]]:
        """Seats for all of a group.

        Other work gets its turn between the members, so that a refusal may come late: then those that were begun are undone.
        """
        wrong = self._violations(wishes[0])
        taken: list[tuple[Rollout, bool]] = []
        try:
            for wish in wishes:
                rollout, attached = self.roster.start(wish, wrong)
                taken.append((rollout, attached))
                if attached:
                    self.streams.check(rollout, stream)
                else:
                    self.streams.sit(rollout, stream)
                await asyncio.sleep(0)
            for rollout, attached in taken:
                if attached:
                    self.streams.check(rollout, stream)
            return [(self.streams.sit(rollout, stream), attached) for rollout, attached in taken]
        except RolloutError:
            for rollout, attached in taken:
                if not attached:
                    self._undo(rollout)
            raise

    def _undo(self, rollout: Rollout) -> None:
        rollout.ask_to_end(Cancellation("another rollout of its group could not be started"))
        seat = self.streams.seat(rollout.uid)
        if seat is not None:
            self.streams.stand(seat, "its group was not started")

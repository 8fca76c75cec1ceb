"""A disk, and the journal that a server keeps on it. Only what was committed survives a crash."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from rollout_server.core.record import Answered, Asked, Ended, ToolReturned, ToolStarted
from rollout_server.runtime.journal import (
    AcceptedStart,
    CancelRequested,
    Change,
    CredentialsChanged,
    DeliveryChanged,
    EntriesAppended,
    GroupDropped,
    GroupFormed,
    GroupGrew,
    JournalUnavailable,
    KeyMinted,
    OutcomeReceived,
    RolloutAccepted,
    RolloutDropped,
    StoredDelivery,
    StoredGroup,
    StoredRollout,
)
from rollout_server.runtime.log import Entry
from rollout_server.runtime.outcome_delivery import DeliveryState

from tests.simulator.faults import Fault, Faults
from tests.simulator.laws import Laws
from tests.support.journal import apply_to_groups


@dataclass(slots=True)
class StoredRecords:
    """A rollout on the disk, also after the server has dropped it.

    `asked` and `answered` are turns, `calls` the ids of the tool calls that run. `ended`: its end is stored. `over`: its delivery
    needs no further attempt.
    """

    start: AcceptedStart
    entries: list[Entry] = field(default_factory=list)
    received: bool = False
    delivery: StoredDelivery | None = None
    dropped: bool = False
    cancelled: str | None = None
    key_digests: bytes = b""
    asked: set[int] = field(default_factory=set)
    answered: set[int] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)
    ended: bool = False

    def has_started(self, key: str) -> bool:
        """Return whether the start of the tool call with this id is stored."""
        return any(isinstance(entry.record, ToolStarted) and entry.record.call.id == key for entry in self.entries)

    @property
    def over(self) -> bool:
        return self.delivery is not None and self.delivery.delivery.state is not DeliveryState.PENDING

    @property
    def acknowledged(self) -> bool:
        return self.delivery is not None and self.delivery.delivery.state is DeliveryState.ACKNOWLEDGED


class Disk:
    """What was committed, by uid in the order of acceptance."""

    def __init__(self, laws: Laws) -> None:
        self.rollouts: dict[str, StoredRecords] = {}
        self.groups: dict[str, StoredGroup] = {}
        self._laws = laws

    def apply(self, change: Change) -> None:
        """Store a change, and check that it may follow what is stored."""
        match change:
            case RolloutAccepted(start):
                self._laws.require(start.uid not in self.rollouts, f"{start.uid} was accepted twice")
                self.rollouts[start.uid] = StoredRecords(start)
            case EntriesAppended(uid, entries):
                self._append(uid, self.rollouts[uid], entries)
            case CredentialsChanged(uid, credentials):
                self._laws.require(uid in self.rollouts, f"{uid} got {credentials!r} before its acceptance")
            case DeliveryChanged(uid, stored):
                self._deliver(uid, self.rollouts[uid], stored)
            case OutcomeReceived(uid):
                self.rollouts[uid].received = True
            case RolloutDropped(uid):
                self._drop(uid, self.rollouts[uid])
            case CancelRequested(uid, reason):
                self.rollouts[uid].cancelled = reason
            case KeyMinted(uid, digests):
                self.rollouts[uid].key_digests = digests
            case GroupFormed() | GroupGrew() | GroupDropped():
                apply_to_groups(self.groups, change)

    def load(self) -> Sequence[StoredRollout]:
        """Return the rollouts that were not dropped."""
        return [
            StoredRollout(
                each.start, tuple(each.entries), each.received, each.delivery, each.cancelled, each.key_digests
            )
            for each in self.rollouts.values()
            if not each.dropped
        ]

    def has(self, uid: str, sequence: int) -> bool:
        """Return whether an entry of a rollout is committed."""
        return uid in self.rollouts and len(self.rollouts[uid].entries) >= sequence

    def _append(self, uid: str, rollout: StoredRecords, entries: Sequence[Entry]) -> None:
        require = self._laws.require
        for entry in entries:
            require(entry.sequence == len(rollout.entries) + 1, f"{uid}: event {entry.sequence} leaves a gap")
            require(not rollout.ended, f"{uid}: {type(entry.record).__name__} after the end")
            require(not rollout.dropped, f"{uid}: {type(entry.record).__name__} after it was dropped")
            rollout.entries.append(entry)
            match entry.record:
                case Asked(turn=turn):
                    rollout.asked.add(turn)
                case Answered(turn=turn):
                    rollout.answered.add(turn)
                case ToolStarted(call=call):
                    rollout.calls.add(call.id)
                case ToolReturned(call=call):
                    rollout.calls.discard(call.id)
                case Ended():
                    rollout.ended = True

    def _deliver(self, uid: str, rollout: StoredRecords, stored: StoredDelivery) -> None:
        before = rollout.delivery
        self._laws.require(rollout.ended, f"{uid}: a delivery before the end")
        if before is not None:
            same = (before.key, before.body) == (stored.key, stored.body)
            self._laws.require(same, f"{uid}: the outcome was packed again with other bytes")
            self._laws.require(not rollout.acknowledged, f"{uid}: a delivery changed after its acknowledgement")
        rollout.delivery = stored

    def _drop(self, uid: str, rollout: StoredRecords) -> None:
        owes = rollout.delivery is not None and not rollout.over
        self._laws.require(not owes, f"{uid} was dropped while its outcome was owed")
        rollout.dropped = True


class DiskJournal:
    """The journal of one process. Writes changes in groups, which take time."""

    server_id = "sim"
    is_durable = True

    def __init__(self, disk: Disk, draw: Random, faults: Faults) -> None:
        self.problem = ""
        self.dead = False
        self._disk = disk
        self._draw = draw
        self._faults = faults
        self._pending: list[tuple[Change, Callable[[], None] | None]] = []
        self._steps: list[int] = []  # of the event loop, in which the pending changes were written
        self._waiting: list[tuple[int, asyncio.Future[None], bool]] = []
        self._written = 0
        self._committed = 0
        self._durable = 0
        self._busy = False

    async def load(self) -> Sequence[StoredRollout]:
        """Return what earlier processes committed."""
        await asyncio.sleep(0)
        return self._disk.load()

    async def load_groups(self) -> Sequence[StoredGroup]:
        """Return the groups that earlier processes committed."""
        await asyncio.sleep(0)
        return list(self._disk.groups.values())

    def write(self, change: Change, committed: Callable[[], None] | None = None) -> None:
        """Take a change. A dead process writes nothing."""
        if self.dead:
            return
        self._pending.append((change, committed))
        self._steps.append(asyncio.get_running_loop().steps)  # type: ignore[attr-defined]
        self._written += 1
        if not self._busy:
            self._busy = True
            asyncio.get_running_loop().call_later(self._delay(), self._begin)

    async def flush(self, *, patient: bool = True) -> None:
        """Wait until everything written so far is committed."""
        if self._committed == self._written:
            return
        if self.problem and not patient:
            raise JournalUnavailable(self.problem)
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append((self._written, waiter, patient))
        await waiter

    def die(self) -> None:
        """The process crashed."""
        self.dead = True
        if self._written > self._durable:
            self._faults.count(Fault.DISK_LOSES)
        if self._durable > self._committed:
            self._faults.count(Fault.DISK_UNSEEN)

    def _delay(self) -> float:
        if self._faults.calm:
            return 0.001
        return self._draw.uniform(0.2, 3.0) if self._faults.happens(Fault.DISK_SLOW) else self._draw.uniform(0, 0.01)

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        if self._faults.happens(Fault.DISK_FULL, 0.3):
            self.problem = "the disk is full"
            for _, waiter, patient in self._waiting:
                if not patient and not waiter.done():
                    waiter.set_exception(JournalUnavailable(self.problem))
            loop.call_later(self._draw.uniform(0.5, 10), self._begin)
            return
        batch = self._pending
        if len(batch) > 1 and self._faults.happens(Fault.DISK_SPLIT):
            end = self._draw.randint(1, len(batch) - 1)
            while end < len(batch) and self._steps[end] == self._steps[end - 1]:
                end += 1  # what was written without an await in between shares a commit
            batch = batch[:end]
        loop.call_later(self._delay(), self._store, [*batch])

    def _store(self, batch: Sequence[tuple[Change, Callable[[], None] | None]]) -> None:
        for change, _ in batch:
            self._disk.apply(change)
        self._durable += len(batch)
        asyncio.get_running_loop().call_soon(self._report, batch)

    def _report(self, batch: Sequence[tuple[Change, Callable[[], None] | None]]) -> None:
        self.problem = ""
        del self._pending[: len(batch)], self._steps[: len(batch)]
        for _, committed in batch:
            if committed is not None:
                committed()
        self._committed += len(batch)
        waiting, self._waiting = self._waiting, []
        for number, waiter, patient in waiting:
            if number > self._committed:
                self._waiting.append((number, waiter, patient))
            elif not waiter.done():
                waiter.set_result(None)
        self._busy = bool(self._pending)
        if self._busy:
            asyncio.get_running_loop().call_later(self._delay(), self._begin)

"""A durable journal in memory: what was committed survives it, and a commit happens when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from rollout_server.runtime.journal import (
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
    StoredGroup,
    StoredRollout,
)


class KeptJournal:
    """Commits in the next iteration of the event loop, or at `commit` if `paused`. `after_crash` is the next process's journal."""

    server_id = "kept"
    is_durable = True

    def __init__(self, committed: Sequence[Change] = ()) -> None:
        self.committed: list[Change] = [*committed]
        self.commits = 0
        self.paused = False
        self.problem = ""
        self._pending: list[tuple[Change, Callable[[], None] | None]] = []
        self._waiting: list[tuple[asyncio.Future[None], bool]] = []

    def after_crash(self) -> KeptJournal:
        """Return a journal with what was committed."""
        return KeptJournal(self.committed)

    async def load(self) -> Sequence[StoredRollout]:
        """Return the rollouts of the committed changes."""
        found: dict[str, StoredRollout] = {}
        for change in self.committed:
            apply(found, change)
        return list(found.values())

    async def load_groups(self) -> Sequence[StoredGroup]:
        """Return the groups of the committed changes."""
        found: dict[str, StoredGroup] = {}
        for change in self.committed:
            apply_to_groups(found, change)
        return list(found.values())

    def write(self, change: Change, committed: Callable[[], None] | None = None) -> None:
        """Take a change."""
        self._pending.append((change, committed))
        if not self.paused:
            asyncio.get_running_loop().call_soon(self.commit)

    async def flush(self, *, patient: bool = True) -> None:
        """Wait for the next commit if anything is pending."""
        if self._pending:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((waiter, patient))
            await waiter

    def commit(self) -> None:
        """Commit everything that is pending."""
        if self.problem or not self._pending:
            return
        pending, self._pending = self._pending, []
        self.committed += [change for change, _ in pending]
        self.commits += 1
        for _, committed in pending:
            if committed is not None:
                committed()
        waiting, self._waiting = self._waiting, []
        for waiter, _ in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def fail(self, problem: str) -> None:
        """Let all commits fail from now on, as on a full disk; an empty text ends it."""
        self.problem = problem
        if not problem:
            self.commit()
            return
        for waiter, patient in self._waiting:
            if not patient and not waiter.done():
                waiter.set_exception(JournalUnavailable(problem))


class LateJournal(KeptJournal):
    """Commits later than a change is written, as a durable journal does; rollouts end with the process, as with memory."""

    is_durable = False


def apply(found: dict[str, StoredRollout], change: Change) -> None:
    """Apply a change to the stored rollouts by uid."""
    match change:
        case RolloutAccepted(start):
            found[start.uid] = StoredRollout(start, ())
        case EntriesAppended(uid, entries):
            found[uid] = replace(found[uid], entries=(*found[uid].entries, *entries))
        case CredentialsChanged(uid, credentials):
            start = found[uid].start
            start = replace(start, request=replace(start.request, credentials=credentials))
            found[uid] = replace(found[uid], start=start)
        case DeliveryChanged(uid, stored):
            found[uid] = replace(found[uid], stored_delivery=stored)
        case CancelRequested(uid, reason):
            found[uid] = replace(found[uid], cancelled=reason)
        case KeyMinted(uid, digests):
            found[uid] = replace(found[uid], key_digests=digests)
        case OutcomeReceived(uid):
            found[uid] = replace(found[uid], received=True)
        case RolloutDropped(uid):
            del found[uid]


def apply_to_groups(found: dict[str, StoredGroup], change: Change) -> None:
    """Apply a change to the stored groups by uid."""
    match change:
        case GroupFormed(group):
            found[group.uid] = StoredGroup(group)
        case GroupGrew(uid, _, index, member):
            found[uid] = replace(found[uid], refills=(*found[uid].refills, (index, member)))
        case GroupDropped(uid):
            del found[uid]

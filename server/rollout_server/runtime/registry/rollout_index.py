"""The rollouts that a server knows: lookup by uid and request id, selection, and retention after the end."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from operator import attrgetter

from rollout_server.core.error import Conflict, NotFound
from rollout_server.core.fingerprint import is_same_payload
from rollout_server.runtime.ports import Clock
from rollout_server.runtime.registry.rollout_sets import MOST_UNSORTED, RolloutSets
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import Rollout, RolloutState
from rollout_server.runtime.start_request import AdmittedStart, Caller, Capacity


@dataclass(frozen=True, slots=True)
class RegistryEntry:
    """A rollout in the index.

    `number` increases with every rollout, so lists can be paged while rollouts come and go. `request` is (caller, completion
    URL, request id), or None.
    """

    number: int
    rollout: Rollout
    request: tuple[str, str, str] | None
    until_received: bool


def filtered(
    entries: Sequence[RegistryEntry], conditions: Sequence[Callable[[Rollout], bool]]
) -> Sequence[RegistryEntry]:
    """Return the entries whose rollouts meet all conditions."""
    for meets in conditions:
        entries = [entry for entry in entries if meets(entry.rollout)]
    return entries


class RolloutIndex:
    """Rollouts in the order in which they were accepted."""

    def __init__(self) -> None:
        self._entries: dict[str, RegistryEntry] = {}
        self._requests: dict[tuple[str, str, str], str] = {}
        self._sets: RolloutSets[RegistryEntry] = RolloutSets()
        self._numbers = count(1)

    def add(self, rollout: Rollout, admitted: AdmittedStart) -> int:
        """Add a rollout and return its number."""
        key = admitted.key
        entry = RegistryEntry(next(self._numbers), rollout, key, admitted.request.until_received)
        self._entries[rollout.uid] = entry
        self._sets.add(rollout, entry)
        if key is not None:
            self._requests[key] = rollout.uid
        return entry.number

    def __contains__(self, uid: str) -> bool:
        return uid in self._entries

    def drop(self, uid: str) -> Rollout:
        """Remove a rollout and its request id, and return it. Raise KeyError for an unknown uid."""
        self.free_request(uid)
        rollout = self._entries.pop(uid).rollout
        self._sets.remove(rollout)
        return rollout

    def mark_finished(self, rollout: Rollout) -> None:
        """Take note that a rollout has finished."""
        self._sets.mark_finished(rollout)

    def free_request(self, uid: str) -> None:
        """Free the request id of a rollout, so that a repeated request starts a new one."""
        request = self._entries[uid].request
        # It may belong to a newer rollout by now: `find` frees it, too, once the outcome was received.
        if request is not None and self._requests.get(request) == uid:
            del self._requests[request]

    def rollouts(self) -> Sequence[Rollout]:
        """Return all rollouts in the order in which they were added."""
        return [entry.rollout for entry in self._entries.values()]

    def get(self, uid: str, caller: Caller) -> Rollout:
        """Return a rollout that the caller may see. Raise `NotFound`."""
        entry = self._entries.get(uid)
        if entry is None or not caller.sees(entry.rollout.caller):
            raise NotFound(
                f"there is no rollout {uid!r}; finished ones are forgotten after a while", reason="ROLLOUT_NOT_FOUND"
            )
        return entry.rollout

    def select(self, selection: Selection) -> Iterator[tuple[int, Rollout]]:
        """Yield the selected rollouts with their numbers, newest first. `Selection.text` is ignored."""
        for entry in filtered(self.candidates(selection, None)[::-1], selection.conditions()):
            yield entry.number, entry.rollout

    def candidates(self, selection: Selection, before: int | None) -> Sequence[RegistryEntry]:
        """Return the entries among which the selected ones are, oldest first, only those with a number below `before`."""
        if selection.uids:
            chosen = (self._entries[uid] for uid in set(selection.uids) if uid in self._entries)
            found: Sequence[RegistryEntry] = list(chosen)
        else:
            found = self._sets.smallest(selection, self._entries)
        if len(found) <= MOST_UNSORTED:
            found = sorted(found, key=attrgetter("number"))
        return found if before is None else found[: bisect_left(found, before, key=attrgetter("number"))]

    def find(self, admitted: AdmittedStart) -> Rollout | None:
        """Return the rollout of an earlier request under this id, or None if the id is free.

        With `until_received`, the id of a finished rollout is free again, with one exception: an identical request whose
        outcome was never received is a retry and finds the rollout (D5). Raises `Conflict` if the earlier request had a
        different payload.
        """
        request_id, key = admitted.request.request_id, admitted.key
        uid = self._requests.get(key) if key is not None else None
        if uid is None:
            return None
        entry = self._entries[uid]
        finished = entry.rollout.state is RolloutState.FINISHED
        if is_same_payload(entry.rollout.fingerprint, admitted.fingerprint):
            return None if entry.until_received and finished and entry.rollout.received else entry.rollout
        if entry.until_received and finished:
            return None
        raise Conflict(
            f"request id {request_id!r} is known with another payload (rollout {uid}); use another id for another rollout"
        )


def check_alike(admitted: Iterable[AdmittedStart]) -> None:
    """Raise `Conflict` if two requests have the same id but different payloads."""
    prints: dict[tuple[str, str, str], str] = {}
    for each in admitted:
        if each.key and not is_same_payload(prints.setdefault(each.key, each.fingerprint), each.fingerprint):
            raise Conflict(f"request id {each.request.request_id!r} occurs twice, with different payloads; use two ids")


class Retention:
    """Finished rollouts that nothing uses any more: no slot, no delivery, no hold. Oldest first."""

    def __init__(self, capacity: Capacity, clock: Clock) -> None:
        self._capacity = capacity
        self._clock = clock
        self._rollouts: deque[tuple[Rollout, float]] = deque()
        self._bytes = 0

    @staticmethod
    def starts(finished: Iterable[Rollout]) -> Sequence[tuple[Rollout, float]]:
        """Return rollouts that earlier processes finished with the time from which on they are kept, the oldest first.

        A rollout is kept from its end on, in a group from the newest end of the group on.
        """
        ends: dict[object, float] = {}
        for each in finished:
            ends[each.group or each] = max(ends.get(each.group or each, 0.0), each.finished or 0.0)
        return sorted(((each, ends[each.group or each]) for each in finished), key=lambda pair: pair[1])

    def add(self, rollout: Rollout, since: float | None = None) -> None:
        """Add a finished rollout. Its retention time begins at `since`, in seconds since 1970; None: it begins here."""
        age = 0.0 if since is None else self._clock.wall() - since
        self._rollouts.append((rollout, self._clock.monotonic() - max(age, 0.0)))
        self._bytes += rollout.size

    def take_back(self, rollouts: Iterable[Rollout]) -> None:
        """Remove rollouts that are in use again. Ignores those that are not here."""
        back = set(rollouts)
        if back:
            self._bytes -= sum(rollout.size for rollout, _ in self._rollouts if rollout in back)
            self._rollouts = deque(each for each in self._rollouts if each[0] not in back)

    def surplus(self) -> Iterator[str]:
        """Remove rollouts that exceed the limits of age, number or size, oldest first, and yield their uids."""
        now, capacity = self._clock.monotonic(), self._capacity
        while self._rollouts:
            rollout, since = self._rollouts[0]
            young = now - since < capacity.finished_seconds
            if young and len(self._rollouts) <= capacity.finished and self._bytes <= capacity.finished_bytes:
                return
            self._rollouts.popleft()
            self._bytes -= rollout.size
            yield rollout.uid

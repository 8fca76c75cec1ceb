"""The rollouts that a server knows: found by uid and by request id, selected, and remembered for a while after their end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from rollout_server.core.error import Conflict, NotFound
from rollout_server.runtime.outcome_delivery import DeliveryState
from rollout_server.runtime.ports import Clock
from rollout_server.runtime.rollout import Rollout, RolloutState
from rollout_server.runtime.start_request import AdmittedStart, Caller, Capacity


@dataclass(frozen=True, slots=True)
class RegistryEntry:
    """`number` counts up, so lists can be paged while rollouts come and go; `request` is (caller, completion URL, request id)."""

    number: int
    rollout: Rollout
    fingerprint: str
    request: tuple[str, str, str] | None
    until_received: bool


@dataclass(frozen=True, slots=True)
class Selection:
    """Rollouts that `caller` sees and that meet every condition that is set."""

    caller: Caller
    uids: tuple[str, ...] = ()
    rollout_ids: tuple[str, ...] = ()
    group_id: str = ""
    agent: str = ""
    states: tuple[RolloutState, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    delivery_states: tuple[DeliveryState, ...] = ()
    callers: tuple[str, ...] = ()

    def matches(self, rollout: Rollout) -> bool:
        """Whether the rollout meets every condition."""
        spec, delivery = rollout.spec, rollout.delivery
        return (
            self.caller.sees(rollout.caller)
            and (not self.callers or rollout.caller in self.callers)
            and (not self.uids or rollout.uid in self.uids)
            and (not self.rollout_ids or spec.rollout_id in self.rollout_ids)
            and (not self.group_id or spec.group_id == self.group_id)
            and (not self.agent or spec.agent == self.agent)
            and (not self.states or rollout.state in self.states)
            and (not self.delivery_states or (delivery is not None and delivery.state in self.delivery_states))
            and all(spec.labels.get(key) == value for key, value in self.labels.items())
        )


class RolloutIndex:
    """Rollouts in the order in which they were taken."""

    def __init__(self) -> None:
        self._entries: dict[str, RegistryEntry] = {}
        self._requests: dict[tuple[str, str, str], str] = {}
        self._numbers = count(1)

    def add(self, rollout: Rollout, admitted: AdmittedStart) -> int:
        """Adds a rollout. Returns its number."""
        key = admitted.key
        entry = RegistryEntry(next(self._numbers), rollout, admitted.fingerprint, key, admitted.request.until_received)
        self._entries[rollout.uid] = entry
        if key is not None:
            self._requests[key] = rollout.uid
        return entry.number

    def drop(self, uid: str) -> None:
        """Removes a rollout and the request id under which it was found. Raises KeyError for an unknown uid."""
        entry = self._entries.pop(uid)
        if entry.request is not None and self._requests.get(entry.request) == uid:
            del self._requests[entry.request]

    def rollouts(self) -> Sequence[Rollout]:
        """All rollouts, in the order in which they were added."""
        return [entry.rollout for entry in self._entries.values()]

    def get(self, uid: str, caller: Caller) -> Rollout:
        """A rollout that the caller sees. Raises `NotFound`."""
        entry = self._entries.get(uid)
        if entry is None or not caller.sees(entry.rollout.caller):
            raise NotFound(
                f"there is no rollout {uid!r}; finished ones are forgotten after a while", reason="ROLLOUT_NOT_FOUND"
            )
        return entry.rollout

    def select(self, selection: Selection, before: int | None) -> Iterator[tuple[int, Rollout]]:
        """The selected rollouts with their numbers, newest first, those with a number below `before` only."""
        if selection.uids:
            chosen = [self._entries[uid] for uid in set(selection.uids) if uid in self._entries]
            entries: Sequence[RegistryEntry] = sorted(chosen, key=lambda entry: -entry.number)
        else:
            entries = list(reversed(self._entries.values()))
        for entry in entries:
            if (before is None or entry.number < before) and selection.matches(entry.rollout):
                yield entry.number, entry.rollout

    def find(self, admitted: AdmittedStart) -> Rollout | None:
        """The rollout of an earlier request under this id. Raises `Conflict` where that was for something else."""
        request_id, key = admitted.request.request_id, admitted.key
        uid = self._requests.get(key) if key is not None else None
        if uid is None:
            return None
        entry = self._entries[uid]
        finished = entry.rollout.state is RolloutState.FINISHED
        if entry.fingerprint == admitted.fingerprint:
            return None if entry.until_received and finished and entry.rollout.received else entry.rollout
        if entry.until_received and finished:
            return None
        raise Conflict(
            f"request id {request_id!r} is known with another payload (rollout {uid}); use another id for another rollout"
        )


def check_alike(admitted: Iterable[AdmittedStart]) -> None:
    """Raises `Conflict` where one id stands for different rollouts."""
    prints: dict[tuple[str, str, str], str] = {}
    for each in admitted:
        if each.key is not None and prints.setdefault(each.key, each.fingerprint) != each.fingerprint:
            raise Conflict(f"request id {each.request.request_id!r} stands twice, with different payloads; use two ids")


class Retention:
    """Those that have finished and owe nobody their outcome, in the order in which that came to be."""

    def __init__(self, capacity: Capacity, clock: Clock) -> None:
        self._capacity = capacity
        self._clock = clock
        self._rollouts: deque[tuple[Rollout, float]] = deque()
        self._bytes = 0

    def add(self, rollout: Rollout) -> None:
        """Adds a finished rollout, whose time begins now."""
        self._rollouts.append((rollout, self._clock.monotonic()))
        self._bytes += rollout.machine.size

    def surplus(self) -> Iterator[str]:
        """Lets go of those that are too old, too many or too large together, the oldest first. Yields their uids."""
        now, capacity = self._clock.monotonic(), self._capacity
        while self._rollouts:
            rollout, since = self._rollouts[0]
            young = now - since < capacity.finished_seconds
            if young and len(self._rollouts) <= capacity.finished and self._bytes <= capacity.finished_bytes:
                return
            self._rollouts.popleft()
            self._bytes -= rollout.machine.size
            yield rollout.uid

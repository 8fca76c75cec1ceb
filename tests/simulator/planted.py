"""Faults planted in the server, to prove that the checkers find them. Each is a patch of the product for the time of a test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, TypeAlias
from unittest.mock import patch

from rollout_server.core.outcome import Cancellation
from rollout_server.core.record import Ended, Input, Record
from rollout_server.core.segment import MaskReason, Span
from rollout_server.core.spec import Target
from rollout_server.runtime.groups.registry import GroupRegistry
from rollout_server.runtime.journal import StoredDelivery
from rollout_server.runtime.log import Entry
from rollout_server.runtime.outcome_delivery import Delivery, DeliveryState
from rollout_server.runtime.registry import interruption
from rollout_server.runtime.registry.admission_queue import RolloutQueue
from rollout_server.runtime.registry.outcome_outbox import Outbox
from rollout_server.runtime.registry.registry import RolloutRegistry
from rollout_server.runtime.registry.rollout_index import RolloutIndex
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.start_request import AdmittedStart

Plant: TypeAlias = "Callable[[], Sequence[Any]]"


class _Hasty:
    """A journal that claims that everything is committed."""

    def __init__(self, journal: Any) -> None:
        self._journal = journal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._journal, name)

    async def flush(self, *, patient: bool = True) -> None:
        """Return at once."""
        await asyncio.sleep(0)


def _outcome_sent_early() -> Sequence[Any]:
    opened, recorded = Outbox.__init__, RolloutRegistry.on_recorded

    def open_outbox(self: Outbox, dependencies: Any, settled: Any) -> None:
        opened(self, dependencies, settled)
        self._journal = _Hasty(self._journal)  # type: ignore[assignment]

    def on_recorded(self: RolloutRegistry, rollout: Rollout, entries: Sequence[Entry]) -> None:
        recorded(self, rollout, entries)
        if isinstance(entries[-1].record, Ended):
            rollout.log.publish(entries[-1].sequence)
            if rollout.spec.outcome is not None:
                self._outbox.send(rollout, rollout.spec.outcome)

    send = Outbox.send

    def send_once(self: Outbox, rollout: Rollout, target: Target) -> None:
        if rollout.delivery is None:
            send(self, rollout, target)

    return (
        patch.object(Outbox, "__init__", open_outbox),
        patch.object(RolloutRegistry, "on_recorded", on_recorded),
        patch.object(Outbox, "send", send_once),
    )


def _accepted_early() -> Sequence[Any]:
    async def accept(self: RolloutRegistry, rollouts: Sequence[Rollout]) -> None:
        await asyncio.sleep(0)

    return (patch.object(RolloutRegistry, "accept", accept),)


def _acknowledgement_not_stored() -> Sequence[Any]:
    update = Outbox._update

    def not_stored(self: Outbox, rollout: Rollout, delivery: Delivery) -> None:
        if delivery.state is DeliveryState.ACKNOWLEDGED:
            rollout.update_delivery(delivery)
        else:
            update(self, rollout, delivery)

    return (patch.object(Outbox, "_update", not_stored),)


def _turn_requested_again() -> Sequence[Any]:
    return (patch.object(interruption, "_open_work", lambda *_: ""),)


def _two_for_one_request() -> Sequence[Any]:
    find = RolloutIndex.find

    def find_published(self: RolloutIndex, admitted: AdmittedStart) -> Rollout | None:
        found = find(self, admitted)
        return found if found is not None and found.log.last_sequence else None

    return (patch.object(RolloutIndex, "find", find_published),)


def _slot_lost() -> Sequence[Any]:
    leave = RolloutQueue.leave

    def leave_unless_cancelled(self: RolloutQueue, rollout: Rollout) -> None:
        outcome = rollout.machine.outcome
        if outcome is None or not isinstance(outcome.end, Cancellation):
            leave(self, rollout)

    return (patch.object(RolloutQueue, "leave", leave_unless_cancelled),)


def _environment_trained() -> Sequence[Any]:
    own = Span.trains.fget  # type: ignore[attr-defined]
    return (patch.object(Span, "trains", property(lambda self: own(self) or self.reason is MaskReason.ENVIRONMENT)),)


def _packed_again() -> Sequence[Any]:
    def restore(self: Outbox, rollout: Rollout, stored: StoredDelivery | None) -> None:
        real(self, rollout, stored)
        self._stored.pop(rollout, None)

    real = Outbox.restore
    return (patch.object(Outbox, "restore", restore),)


def _published_early() -> Sequence[Any]:
    record = Rollout.record

    def record_and_publish(self: Rollout, what: Input) -> tuple[Record, ...]:
        before = len(self.log.entries)
        logged = record(self, what)
        self.log.publish(len(self.log.entries))
        self._owner.on_published(
            self, [entry for entry in self.log.entries[before:] if not isinstance(entry.record, Ended)]
        )
        return logged

    return (patch.object(Rollout, "record", record_and_publish),)


def _owed_outcome_dropped() -> Sequence[Any]:
    return (patch.object(Outbox, "holds", lambda self, rollout: False),)


def _group_forgotten() -> Sequence[Any]:
    return (patch.object(GroupRegistry, "_list", lambda self, group: None),)


PLANTED: Final[dict[str, tuple[Plant, str]]] = {
    "an outcome is sent before it is committed": (_outcome_sent_early, "sent before the outcome was committed"),
    "an acceptance is reported before it is committed": (
        _accepted_early,
        "accepted before its acceptance was committed",
    ),
    "an acknowledgement is not stored": (_acknowledgement_not_stored, "its delivery is not over"),
    "a turn is requested again although the trainer does not replay keys": (
        _turn_requested_again,
        "was requested by another process",
    ),
    "two rollouts for one request id": (_two_for_one_request, "have one request id"),
    "a slot is not released after a cancellation": (_slot_lost, "still held at the end"),
    "a token of the environment trains": (_environment_trained, "of None trains"),
    "an outcome is packed again after a restart": (_packed_again, "packed again with other bytes"),
    "a record is published before it is committed": (_published_early, "was published before its commit"),
    "a group is not found again": (_group_forgotten, "and the server does not know it"),
    "a rollout is dropped whose outcome is owed": (_owed_outcome_dropped, "dropped while its outcome was owed"),
}
"""The faults by name, each with words of the law that it breaks."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a fault in the server."""
    with ExitStack() as stack:
        for each in PLANTED[name][0]():
            stack.enter_context(each)
        yield

"""A collection of saved rollouts, of which few are in memory at the same time."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from osmosis.rollout.v1 import event_pb2, outcome_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_gateway.message_json import message_json

from rollout_server.core.error import NotFound
from rollout_server.inspection.so_far import add_outcome_so_far
from rollout_server.runtime.registry.selection import TextSearch

_RECENT: Final = 4
"""Number of recordings that stay in memory: a page asks for the same rollout several times."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A saved rollout in the view "full", and its events with the detail "full".

    If no events were saved, its `last_sequence` is 0, and clients read its outcome alone.
    """

    rollout: pb.Rollout
    events: Sequence[event_pb2.RolloutEvent] = ()

    @property
    def outcome(self) -> outcome_pb2.Outcome:
        """Its outcome, or what its events have of it if it had not finished."""
        if self.rollout.HasField("outcome"):
            return self.rollout.outcome
        so_far = pb.Rollout(last_sequence=self.rollout.last_sequence)
        add_outcome_so_far(so_far, self.events)
        return so_far.outcome


class SavedRollout(Protocol):
    """A rollout that can be read."""

    @property
    def uid(self) -> str:
        """Id of the rollout."""

    def read(self) -> Recording:
        """Read the rollout. Raises `Unreadable`."""

    def summary(self) -> pb.Rollout:
        """Read the rollout in the view "basic". Cheaper than `read`, most of all for neighbours. Raises `Unreadable`."""


class Unreadable(ValueError):
    """Saved rollouts cannot be read. The text names the file, what is wrong with it, and what to do."""


@dataclass(frozen=True, slots=True)
class ArchivePage:
    """Some rollouts with their numbers, newest first. `next_before`: further ones have lower numbers; None: there are none."""

    rollouts: Sequence[tuple[int, pb.Rollout]]
    next_before: int | None


class Archive:
    """Saved rollouts. Threads may share it.

    Args:
        saved: the rollouts, oldest first. Of rollouts with the same uid, the last one counts.
    """

    def __init__(self, saved: Sequence[SavedRollout]) -> None:
        self._saved = [*{each.uid: each for each in saved}.values()]
        self._numbers = {each.uid: number for number, each in enumerate(self._saved)}
        self._summaries: dict[int, bytes] = {}
        self._recent: OrderedDict[str, Recording] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def uids(self) -> Sequence[str]:
        """Uids of all rollouts, oldest first."""
        return [each.uid for each in self._saved]

    def read(self, uid: str) -> Recording:
        """Return a rollout, which the caller must not change. Raises `NotFound` or `Unreadable`."""
        number = self._numbers.get(uid)
        if number is None:
            raise NotFound(f"there is no rollout {uid!r} among the saved ones", reason="ROLLOUT_NOT_FOUND")
        with self._lock:
            if uid not in self._recent:
                self._recent[uid] = self._saved[number].read()
            self._recent.move_to_end(uid)
            while len(self._recent) > _RECENT:
                self._recent.popitem(last=False)
            return self._recent[uid]

    def page(self, selection: pb.Selection, before: int | None, size: int, seconds: float) -> ArchivePage:
        """Return the newest selected rollouts with numbers below `before`, in the view "basic".

        The page is short if reading rollouts takes longer than `seconds`; one rollout at least is examined.
        """
        found: list[tuple[int, pb.Rollout]] = []
        end = time.monotonic() + seconds
        for number in reversed(range(len(self._saved) if before is None else min(before, len(self._saved)))):
            summary = self.summary(number)
            if self._matches(number, summary, selection):
                found.append((number, summary))
            if len(found) == size or time.monotonic() > end:
                return ArchivePage(found, number or None)
        return ArchivePage(found, None)

    def summary(self, number: int) -> pb.Rollout:
        """Return a rollout in the view "basic". One that cannot be read is shown as failed, with the reason."""
        if number not in self._summaries:
            with self._lock:
                self._summaries[number] = self._summarize(self._saved[number]).SerializeToString()
        return pb.Rollout.FromString(self._summaries[number])

    def _summarize(self, saved: SavedRollout) -> pb.Rollout:
        try:
            return saved.summary()
        except Unreadable as error:
            text = str(error).encode("utf-8", "replace").decode()
            failure = outcome_pb2.Failure(
                category=outcome_pb2.FAILURE_CATEGORY_INTERNAL, message=f"cannot be read: {text}"
            )
            outcome = outcome_pb2.Outcome(failure=failure)
            return pb.Rollout(uid=saved.uid, state=pb.ROLLOUT_STATE_FINISHED, outcome=outcome)

    def _matches(self, number: int, rollout: pb.Rollout, selection: pb.Selection) -> bool:
        spec = rollout.spec
        return (
            _allows(selection.uids, rollout.uid)
            and _allows(selection.rollout_ids, spec.rollout_id)
            and selection.group_id in ("", spec.group_id)
            and selection.agent in ("", spec.agent)
            and _allows(selection.states, rollout.state)
            and _allows(selection.callers, rollout.caller)
            and _allows(selection.delivery_states, rollout.delivery.state)
            and _allows(selection.failure_classes, _failure_class(rollout.outcome))
            and all(spec.labels.get(key) == value for key, value in selection.labels.items())
            and (not selection.text or self._contains(number, rollout, selection.text))
        )

    def _contains(self, number: int, rollout: pb.Rollout, text: str) -> bool:
        """Search the facts of a rollout that the index has, and then its messages."""
        spec, outcome = rollout.spec, rollout.outcome
        labels = (part for pair in spec.labels.items() for part in pair)
        ends = (outcome.stop.reason, outcome.failure.message, outcome.cancellation.reason)
        facts = (rollout.uid, spec.rollout_id, spec.group_id, spec.agent, *labels, *ends)
        return any(TextSearch(text).steps(facts, self._messages(number)))

    def _messages(self, number: int) -> Iterator[str]:
        """Yield the JSON of a rollout's messages; of one that cannot be read, none."""
        try:
            found = self.read(self._saved[number].uid)
        except Unreadable:
            return
        for message in (*found.rollout.spec.messages, *found.outcome.messages):
            yield bytes(message_json(message)).decode()


def basic(rollout: pb.Rollout) -> pb.Rollout:
    """Return a rollout in the view "basic"."""
    found = pb.Rollout()
    found.CopyFrom(rollout)
    found.spec.ClearField("messages")
    if found.HasField("outcome"):
        for name in ("messages", "samples", "segments"):
            found.outcome.ClearField(name)
    return found


def _allows(wanted: Sequence[object], value: object) -> bool:
    return not wanted or value in wanted


def _failure_class(outcome: outcome_pb2.Outcome) -> int:
    if outcome.HasField("cancellation"):
        return outcome_pb2.FAILURE_CLASS_CANCELLED
    return outcome.failure.failure_class

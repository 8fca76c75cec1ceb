"""Sets of rollouts that lists often select: those of a caller, an agent, a group or a failure class, and the unfinished ones.

Testing the conditions of a selection takes a microsecond per rollout. With the sets, a list among many rollouts tests few.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Generic, TypeAlias, TypeVar

from rollout_server.core.outcome import failure_class_of
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import Rollout

_T = TypeVar("_T")
_Key: TypeAlias = tuple[str, object]
MOST_UNSORTED: Final = 4096
"""Entries that can be sorted without blocking the event loop for more than a few milliseconds."""
_UNFINISHED: Final[_Key] = ("state", "unfinished")


class RolloutSets(Generic[_T]):
    """Entries of rollouts by what lists select, in the order in which they were added; of a failure class, in any order."""

    def __init__(self) -> None:
        self._sets: dict[_Key, dict[str, _T]] = {}

    def add(self, rollout: Rollout, entry: _T) -> None:
        """Add a rollout's entry to its sets."""
        for key in _keys(rollout):
            self._sets.setdefault(key, {})[rollout.uid] = entry

    def remove(self, rollout: Rollout) -> None:
        """Remove a rollout's entry from all sets that have it."""
        for key in (_UNFINISHED, *_keys(rollout)):
            self._discard(key, rollout.uid)

    def mark_finished(self, rollout: Rollout) -> None:
        """Move the entry of a rollout that has finished from the unfinished ones to its failure class, if it has one."""
        entry = self._sets.get(_UNFINISHED, {}).get(rollout.uid)
        if entry is not None:
            self._discard(_UNFINISHED, rollout.uid)
            for key in _class_keys(rollout):
                self._sets.setdefault(key, {})[rollout.uid] = entry

    def smallest(self, selection: Selection, everything: Mapping[str, _T]) -> Sequence[_T]:
        """Return the smallest set that contains all selected rollouts. At most `MOST_UNSORTED` entries may be in any order."""
        sets = [(key, self._sets.get(key, {})) for key in _selected(selection)]
        usable = (each for key, each in sets if key[0] != "class" or len(each) <= MOST_UNSORTED)
        return list(min((everything, *usable), key=len).values())

    def _discard(self, key: _Key, uid: str) -> None:
        entries = self._sets.get(key)
        if entries is not None and entries.pop(uid, None) is not None and not entries:
            del self._sets[key]


def _keys(rollout: Rollout) -> Iterator[_Key]:
    yield "caller", rollout.caller
    yield "agent", rollout.spec.agent
    if rollout.spec.group_id:
        yield "group", rollout.spec.group_id
    if rollout.outcome is None:
        yield _UNFINISHED
    yield from _class_keys(rollout)


def _class_keys(rollout: Rollout) -> Iterator[_Key]:
    found = None if rollout.outcome is None else failure_class_of(rollout.outcome.end)
    if found is not None:
        yield "class", found


def _selected(selection: Selection) -> Sequence[_Key]:
    """Return keys of sets that each contain all selected rollouts."""
    singles: Sequence[tuple[str, Sequence[object]]] = (
        ("caller", () if selection.caller.admin else (selection.caller.name,)),
        ("caller", selection.callers),
        ("agent", (selection.agent,) if selection.agent else ()),
        ("group", (selection.group_id,) if selection.group_id else ()),
        ("class", selection.failure_classes),
    )
    found = [(name, values[0]) for name, values in singles if len(values) == 1]
    return [*found, _UNFINISHED] if selection.is_unfinished else found

"""Groups of rollouts: unequal sizes, and rewards without a difference, from which a group-relative trainer learns nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from rollout_server.verification.findings import FindingKind, Location, SampleFinding
from rollout_server.verification.row_checks import reward_of
from rollout_server.verification.shapes import RawRow

_GROUPS: Final = 100_000
"""Groups that may be incomplete. When there are more, the one that got no row for the longest time is taken as complete."""
_ROLLOUTS: Final = 4096
"""Rollouts of a group that are told apart."""
_SIZES: Final = 64
"""Different sizes that are counted."""


@dataclass(slots=True)
class _RewardedGroup:
    """The rollouts of a group so far, the number of rows without a rollout id, and at most two different rewards."""

    name: str
    location: Location
    uids: set[str] = field(default_factory=set)
    rows: int = 0
    rewards: set[float] = field(default_factory=set)
    unrewarded: bool = False

    @property
    def size(self) -> int:
        return len(self.uids) + self.rows


class GroupChecks:
    """Collect the groups of a file. Rows may come in any order."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, _RewardedGroup] = OrderedDict()
        self._sizes: dict[int, tuple[int, _RewardedGroup]] = {}

    def add(self, raw: RawRow) -> Iterator[SampleFinding]:
        """Add a row, and yield findings about a group that is taken as complete."""
        if not raw.group:
            return
        group = self._groups.setdefault(raw.group, _RewardedGroup(raw.group, raw.location))
        self._groups.move_to_end(raw.group)
        if not raw.uid:
            group.rows += 1
        elif len(group.uids) < _ROLLOUTS:
            group.uids.add(raw.uid)
        reward = reward_of(raw)
        if reward is None:
            group.unrewarded = True
        elif len(group.rewards) < 2:
            group.rewards.add(reward)
        if len(self._groups) > _GROUPS:
            yield from self._complete(self._groups.popitem(last=False)[1])

    def finish(self) -> Iterator[SampleFinding]:
        """Yield the findings about all groups that were not complete yet, and about their sizes."""
        while self._groups:
            yield from self._complete(self._groups.popitem(last=False)[1])
        if not self._sizes:
            return
        usual = max(self._sizes, key=lambda size: (self._sizes[size][0], size))
        for size, (count, group) in sorted(self._sizes.items()):
            if size != usual:
                which = f"group {group.name!r} has" if count == 1 else f"{count} groups, such as {group.name!r}, have"
                text = f"{which} {size} rollouts; most groups have {usual}"
                yield SampleFinding(FindingKind.GROUP_SIZES, group.location, text)
        self._sizes.clear()

    def _complete(self, group: _RewardedGroup) -> Iterator[SampleFinding]:
        count, first = self._sizes.get(group.size, (0, group))
        if count or len(self._sizes) < _SIZES:
            self._sizes[group.size] = count + 1, first
        if group.size > 1 and len(group.rewards) == 1 and not group.unrewarded:
            (reward,) = group.rewards
            text = (
                f"all {group.size} rollouts of group {group.name!r} have reward {reward:g}, so their advantages are 0"
            )
            yield SampleFinding(FindingKind.CONSTANT_REWARD, group.location, text)

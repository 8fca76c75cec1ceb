"""Pages of the rollouts that a selection finds, without blocking the event loop for long."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rollout_server.core.error import Busy
from rollout_server.runtime.aio.slices import SLICE
from rollout_server.runtime.registry.rollout_index import RegistryEntry, RolloutIndex, filtered
from rollout_server.runtime.registry.selection import Selection, TextSearch, facts_of
from rollout_server.runtime.rollout import Rollout

_SLICES: Final = 100
"""Slices after which a scan ends, and with it the page."""
_CHUNK: Final = 256
"""Candidates whose conditions are tested in one step."""
MOST_SCANS: Final = 64
"""Scans of one caller that run or wait for their turn."""


@dataclass(frozen=True, slots=True)
class RolloutPage:
    """Rollouts with their numbers, newest first. `next_before`: the next page begins below this number; None: it is the last."""

    rollouts: Sequence[tuple[int, Rollout]]
    next_before: int | None


class RolloutPages:
    """Finds pages of rollouts. A scan works in slices and yields to the event loop after each.

    After its first slice a scan waits for its turn, so that many scans do not take all the time of the event loop.
    """

    def __init__(self, index: RolloutIndex) -> None:
        self._index = index
        self._turn = asyncio.Lock()
        self._scans = Counter[str]()

    async def page(self, selection: Selection, before: int | None, size: int) -> RolloutPage:
        """Return at most `size` selected rollouts with numbers below `before`. Raises `Busy`.

        A scan that takes long ends early: then the page may be short, or empty, although `next_before` is set.
        """
        scan = _Scan(selection, self._index.candidates(selection, before), size)
        if not scan.run(last=False):
            caller = selection.caller.name
            if self._scans[caller] >= MOST_SCANS:
                raise Busy("too many lists of rollouts are being made", retry_after=1.0, reason="TOO_MANY_CALLS")
            self._scans[caller] += 1
            try:
                async with self._turn:
                    await scan.run_on()
            finally:
                self._scans -= Counter((caller,))  # without those that become 0
        return RolloutPage(scan.found, scan.next_before)


class _Scan:
    """Examines candidates, from the last one on.

    Attributes:
        found: the selected rollouts so far.
        next_before: see `RolloutPage`.
    """

    def __init__(self, selection: Selection, candidates: Sequence[RegistryEntry], size: int) -> None:
        self.found: list[tuple[int, Rollout]] = []
        self.next_before: int | None = None
        self._selection = selection
        self._search = TextSearch(selection.text) if selection.text else None
        self._size = size
        self._steps = self._examine(candidates)

    async def run_on(self) -> None:
        """Continue, with a pause after each slice, until the page is complete or the scan has taken long enough."""
        slices = 1
        while True:
            await asyncio.sleep(0)
            slices += 1
            if self.run(last=slices >= _SLICES):
                return

    def run(self, *, last: bool) -> bool:
        """Continue for one slice. Return whether the scan is over: the page is complete, or it was the last slice.

        A rollout is searched to its end, even if that takes further slices: the next page must not begin with it again.
        """
        ends = time.perf_counter() + SLICE
        for is_between in self._steps:
            if time.perf_counter() > ends:
                return last and is_between
        return True

    def _search_steps(self, rollout: Rollout) -> Iterator[bool]:
        if self._search is not None:
            yield from self._search.steps(facts_of(rollout), (each.text for each in rollout.machine.messages))

    def _examine(self, candidates: Sequence[RegistryEntry]) -> Iterator[bool]:
        """Examine one candidate after the other. Yields after each step whether the next one begins with another candidate."""
        conditions = self._selection.conditions()
        for stop in range(len(candidates), 0, -_CHUNK):
            chunk = candidates[max(0, stop - _CHUNK) : stop][::-1]
            for entry in filtered(chunk, conditions):
                is_found = self._search is None
                for is_found in self._search_steps(entry.rollout):
                    if is_found:
                        break
                    yield False
                if is_found and len(self.found) == self._size:
                    self.next_before = self.found[-1][0]
                    return
                if is_found:
                    self.found.append((entry.number, entry.rollout))
                self.next_before = entry.number
                if self._search is not None:
                    yield True
            self.next_before = chunk[-1].number
            yield True
        self.next_before = None

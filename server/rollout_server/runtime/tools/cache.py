"""Results that are kept: of idempotent tools whose policy says so, for the whole server."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any

from rollout_server.runtime.ports import Content

_EXTRA = 200
"""Bytes that an entry takes beside its texts, roughly."""


@dataclass(frozen=True, slots=True)
class _CachedResult:
    content: Content
    size: int
    until: float | None


@dataclass(slots=True, eq=False)
class _SharedCall:
    task: asyncio.Task[Content]
    waiting: int = 0


class ResultCache:
    """The results used last, up to a number and a size. Calls that are equal and come together run once."""

    def __init__(self, entries: int, size: int) -> None:
        self._most, self._largest = entries, size
        self._kept: OrderedDict[Hashable, _CachedResult] = OrderedDict()
        self._size = 0
        self._flights: dict[Hashable, _SharedCall] = {}

    async def get(
        self, key: Hashable, key_size: int, seconds: float | None, perform: Callable[[], Coroutine[Any, Any, Content]]
    ) -> Content:
        """The result that is kept under `key`, or that of `perform`, which is cancelled when nobody waits for it any more.

        What `perform` raises is raised for all who wait, and not kept.
        """
        kept = self._kept.get(key)
        if kept is not None and (kept.until is None or _now() < kept.until):
            self._kept.move_to_end(key)
            return kept.content
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _SharedCall(asyncio.create_task(perform(), name="call for the cache"))
            flight.task.add_done_callback(lambda task: self._landed(key, key_size, seconds, task))
        flight.waiting += 1
        try:
            await asyncio.wait({flight.task})
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                flight.task.cancel()
                self._forget_flight(key, flight.task)
        return flight.task.result()

    def _landed(self, key: Hashable, key_size: int, seconds: float | None, task: asyncio.Task[Content]) -> None:
        self._forget_flight(key, task)
        if task.cancelled() or task.exception() is not None:
            return
        content = task.result()
        self._drop(key)
        kept = _CachedResult(content, key_size + _size(content) + _EXTRA, None if seconds is None else _now() + seconds)
        self._kept[key] = kept
        self._size += kept.size
        while self._kept and (len(self._kept) > self._most or self._size > self._largest):
            self._drop(next(iter(self._kept)))

    def _forget_flight(self, key: Hashable, task: asyncio.Task[Content]) -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]

    def _drop(self, key: Hashable) -> None:
        dropped = self._kept.pop(key, None)
        if dropped is not None:
            self._size -= dropped.size


def _size(content: Content) -> int:
    if isinstance(content, str):
        return 4 * len(content)
    return sum(4 * len(str(part)) for part in content)


def _now() -> float:
    return asyncio.get_running_loop().time()

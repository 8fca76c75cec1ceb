"""Server-wide cache of results of idempotent tools whose policy enables caching."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any

from rollout_server.runtime.ports import Content

_EXTRA = 200
"""Approximate overhead of an entry besides its texts, in bytes."""


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
    """LRU cache, limited by number of entries and bytes. Concurrent equal calls run once and share the result."""

    def __init__(self, entries: int, size: int) -> None:
        self._most, self._largest = entries, size
        self._results: OrderedDict[Hashable, _CachedResult] = OrderedDict()
        self._size = 0
        self._calls: dict[Hashable, _SharedCall] = {}

    async def get(
        self, key: Hashable, key_size: int, seconds: float | None, perform: Callable[[], Coroutine[Any, Any, Content]]
    ) -> Content:
        """Return the cached result for `key`, or run `perform` and cache its result.

        Concurrent callers share one task. It is cancelled when its last caller is cancelled. Exceptions of `perform` are raised
        for all callers and not cached.
        """
        result = self._results.get(key)
        if result is not None and (result.until is None or _now() < result.until):
            self._results.move_to_end(key)
            return result.content
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = _SharedCall(asyncio.create_task(perform(), name="call for the cache"))
            call.task.add_done_callback(lambda task: self._store(key, key_size, seconds, task))
        call.waiting += 1
        try:
            # `asyncio.wait` does not cancel the task when this caller is cancelled: other callers may still need it.
            await asyncio.wait({call.task})
        finally:
            call.waiting -= 1
            if not call.waiting and not call.task.done():
                call.task.cancel()
                self._forget_call(key, call.task)  # now: a caller that comes before the task ends must not join it
        return call.task.result()

    def _store(self, key: Hashable, key_size: int, seconds: float | None, task: asyncio.Task[Content]) -> None:
        self._forget_call(key, task)
        if task.cancelled() or task.exception() is not None:
            return
        content = task.result()
        self._drop(key)
        result = _CachedResult(
            content, key_size + _size(content) + _EXTRA, None if seconds is None else _now() + seconds
        )
        self._results[key] = result
        self._size += result.size
        while self._results and (len(self._results) > self._most or self._size > self._largest):
            self._drop(next(iter(self._results)))

    def _forget_call(self, key: Hashable, task: asyncio.Task[Content]) -> None:
        call = self._calls.get(key)
        if call is not None and call.task is task:
            del self._calls[key]

    def _drop(self, key: Hashable) -> None:
        dropped = self._results.pop(key, None)
        if dropped is not None:
            self._size -= dropped.size


def _size(content: Content) -> int:
    """Return the maximum memory of the texts: a Python string uses up to 4 bytes per character."""
    if isinstance(content, str):
        return 4 * len(content)
    return sum(4 * len(str(part)) for part in content)


def _now() -> float:
    return asyncio.get_running_loop().time()

"""What is under way in a rollout, and whether all of it waits for the rollout's trainer or for a slot.

A trainer that generates in batches needs to know when no further request can come. A rollout is *blocked* while everything under
way in it waits for a completion of the trainer, or for a slot that is not free. The rollout itself is under way, and within it
each completion, tool call and call of a further model. A tool that samples is blocked by its completion, so what is under way is
nested. Context variables hold the innermost one: tasks and threads that an agent starts inherit it.

Other work of an agent beside a pending completion, such as a sleep in another task, is not known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any


class Work:
    """One thing under way. It waits while one of the futures in `waits` is open, which it or something within it awaits."""

    __slots__ = ("activity", "waits", "within")

    def __init__(self, activity: RolloutActivity, within: Work | None) -> None:
        self.activity = activity
        self.within = within
        self.waits: set[asyncio.Future[Any]] = set()

    def enclosing(self) -> Iterator[Work]:
        """Yield this work and everything that it is within."""
        work: Work | None = self
        while work is not None:
            yield work
            work = work.within


_innermost: ContextVar[Work | None] = ContextVar("innermost work", default=None)


class RolloutActivity:
    """What is under way in one rollout. Lives on one event loop.

    Attributes:
        on_change: called when something has begun, ended, or begun to wait. None: nobody wants to know.
    """

    def __init__(self) -> None:
        self._whole = Work(self, None)
        self._under_way = {self._whole}
        self.on_change: Callable[[], None] | None = None

    @property
    def is_blocked(self) -> bool:
        """Whether everything under way waits. A future that is done does not count: the task that awaits it is about to run."""
        return all(any(not future.done() for future in work.waits) for work in self._under_way)

    def changed(self) -> None:
        """Report a change, also one outside of this module: the rollout has left its slot."""
        if self.on_change is not None:
            self.on_change()

    def enter(self) -> None:
        """Mark the current task, and all that it starts, as part of the rollout."""
        _innermost.set(self._whole)

    def begin(self) -> Work:
        """Mark what the current task does from now on as something under way, until `end`."""
        work = Work(self, self._current())
        self._under_way.add(work)
        _innermost.set(work)
        self.changed()
        return work

    def end(self, work: Work) -> None:
        """Mark the work of `begin` as ended. Called in the same task."""
        _innermost.set(work.within)
        self._under_way.discard(work)
        self.changed()

    @contextmanager
    def waiting(self, future: asyncio.Future[Any]) -> Iterator[None]:
        """Mark that the innermost work, and all that it is within, waits for a future during the block."""
        works = tuple(self._current().enclosing())
        for work in works:
            work.waits.add(future)
        self.changed()
        try:
            yield
        finally:
            for work in works:
                work.waits.discard(future)

    def _current(self) -> Work:
        """Return the innermost work. Calls from outside, such as those of the model endpoint, are in the rollout only."""
        work = _innermost.get()
        return work if work is not None and work.activity is self else self._whole


@contextmanager
def waiting_for_slot(granted: asyncio.Future[Any]) -> Iterator[None]:
    """Mark that what is under way in this task waits for a slot. Has no effect outside of rollouts."""
    work = _innermost.get()
    if work is None:
        yield
        return
    with work.activity.waiting(granted):
        yield

"""Group commit: collects changes on the event loop, and has the journal's thread commit them.

All state is on the event loop. The thread gets a list of changes, commits it, and reports back once; nobody holds a lock. There is
one commit at a time, and the changes that arrive meanwhile are the next one.

A commit that fails is tried again together with what arrived since, so nothing is lost or reordered. While it fails, changes
collect in memory. They are of rollouts that were accepted before: a server whose journal has a `problem` accepts no others.
Each of these has its limits, and waits for the commit before it goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from rollout_server.runtime.journal import JournalUnavailable

_log = logging.getLogger(__name__)

_LINGER_SECONDS: Final = 0.005
"""How long a change waits for others if nobody waits for it: the records of one turn then share a row."""

_FIRST_RETRY_SECONDS: Final = 0.1
_LAST_RETRY_SECONDS: Final = 5.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Waiter:
    """A call of `flush` that waits for the first `count` changes."""

    count: int
    patient: bool
    done: asyncio.Future[None]


class CommitQueue(Generic[_T]):
    """Changes in their order, and who waits for them.

    Args:
        commit: commits changes, in `thread`. It raises `JournalUnavailable` if that has to be tried again.
        thread: has one worker.
    """

    def __init__(self, commit: Callable[[Sequence[_T]], None], thread: Executor) -> None:
        self._commit = commit
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self._pending: list[tuple[_T, Callable[[], None] | None]] = []
        self._committing: list[tuple[_T, Callable[[], None] | None]] = []
        self._written = 0
        self._committed = 0
        self._waiters: deque[_Waiter] = deque()
        self._planned: asyncio.Handle | None = None
        self._at_once = False
        self._retry_seconds = _FIRST_RETRY_SECONDS
        self._is_closed = False
        self.problem = ""

    def add(self, change: _T, committed: Callable[[], None] | None) -> None:
        """Take a change for the next commit."""
        self._pending.append((change, committed))
        self._written += 1
        self._plan(at_once=False)

    async def flush(self, *, patient: bool) -> None:
        """Wait for all changes so far. Raises `JournalUnavailable` if not `patient` and a commit fails."""
        if self._written == self._committed:
            return
        if self.problem and not patient:
            raise JournalUnavailable(self.problem)
        done = self._loop.create_future()
        self._waiters.append(_Waiter(self._written, patient, done))
        self._plan(at_once=True)
        await done

    async def close(self, seconds: float) -> None:
        """Commit what is pending, for at most `seconds`. Then nobody waits any more."""
        if self.problem and self._planned is not None:
            self._planned.cancel()
            self._submit()
        try:
            async with asyncio.timeout(seconds):
                while self._written > self._committed:  # what is published by a commit may write more
                    await self.flush(patient=True)
        except TimeoutError:
            lost = self._written - self._committed
            _log.error("closing the journal without %d changes: %s", lost, self.problem or "the disk is too slow")
        self._is_closed = True
        if self._planned is not None:
            self._planned.cancel()
        self._fail("the journal was closed", patient=True)

    def _plan(self, *, at_once: bool) -> None:
        """Plan the next commit, unless one runs, is about to begin, or waits to be tried again."""
        if self._committing or self._at_once or self.problem:
            return
        if at_once:
            if self._planned is not None:
                self._planned.cancel()
            self._at_once = True
            # What is about to run in this pass of the loop and in the next one gets into the same commit: other rollouts, and
            # the first turn of one that was accepted now, whose task is only then started.
            self._planned = self._loop.call_soon(self._submit_soon)
        elif self._planned is None:
            self._planned = self._loop.call_later(_LINGER_SECONDS, self._submit)

    def _submit_soon(self) -> None:
        self._planned = self._loop.call_soon(self._submit)

    def _submit(self) -> None:
        self._planned, self._at_once = None, False
        self._committing, self._pending = self._pending, []
        self._thread.submit(self._run, [change for change, _ in self._committing])

    def _run(self, changes: Sequence[_T]) -> None:
        """Commit in the thread, and report to the event loop."""
        problem = ""
        try:
            self._commit(changes)
        except JournalUnavailable as error:
            problem = str(error)
        except Exception as error:  # the boundary of the thread
            if not self.problem:
                _log.exception("the journal failed unexpectedly")
            problem = f"the journal failed unexpectedly ({type(error).__name__}); the server's log has the reason"
        with suppress(RuntimeError):  # the loop was closed, and nothing waits for the commit any more
            self._loop.call_soon_threadsafe(self._finish, problem)

    def _finish(self, problem: str) -> None:
        if self._is_closed:
            return
        changes, self._committing = self._committing, []
        if problem:
            self._retry(changes, problem)
            return
        if self.problem:
            _log.warning("the journal can be written again")
            self.problem = ""
            self._retry_seconds = _FIRST_RETRY_SECONDS
        self._committed += len(changes)
        for _, committed in changes:
            if committed is not None:
                _call(committed)
        self._resume()
        if self._pending:
            self._plan(at_once=bool(self._waiters))

    def _retry(self, changes: list[tuple[_T, Callable[[], None] | None]], problem: str) -> None:
        if not self.problem:
            _log.error("%s; the server tries again, and refuses new rollouts until it succeeds", problem)
        self.problem = problem
        self._pending = changes + self._pending
        self._fail(problem, patient=False)
        self._planned = self._loop.call_later(self._retry_seconds, self._submit)
        self._retry_seconds = min(2 * self._retry_seconds, _LAST_RETRY_SECONDS)

    def _resume(self) -> None:
        """Wake those whose changes are committed. Later ones wait for at least as many."""
        while self._waiters and self._waiters[0].count <= self._committed:
            done = self._waiters.popleft().done
            if not done.done():
                done.set_result(None)

    def _fail(self, problem: str, *, patient: bool) -> None:
        """Raise `JournalUnavailable` to those who are not patient; to all if `patient`."""
        for waiter in self._waiters:
            if (patient or not waiter.patient) and not waiter.done.done():
                waiter.done.set_exception(JournalUnavailable(problem))
        self._waiters = deque(waiter for waiter in self._waiters if not waiter.done.done())


def _call(committed: Callable[[], None]) -> None:
    try:
        committed()
    except Exception:  # a rollout's bug must not keep the others from hearing of their commit
        _log.exception("a rollout failed after its changes were committed")

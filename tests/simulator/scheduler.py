"""An event loop with virtual time that runs the same steps in the same order whenever it is given the same seed.

Three things would differ between two processes otherwise. Sets of tasks are iterated in the order of their hashes, which are
addresses: tasks and futures are numbered here, and the number is the hash. The clock jumps to the next timer when nothing is ready.
There are no sockets and no threads.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio import events
from collections.abc import Callable, Coroutine, Generator
from random import Random
from threading import get_ident
from typing import Any

STEPS_WITHOUT_TIME = 20_000
"""Steps at one moment of virtual time after which the world counts as an endless loop."""


MOST_STEPS = 100_000
"""Steps after which a process counts as one that never ends. Hardly any needs 10,000."""


class Stuck(AssertionError):
    """Nothing is ready and no timer is set, or time does not advance."""


class NumberedTask(asyncio.Task[Any]):
    """A task whose hash is its number in its loop."""

    def __init__(self, work: Coroutine[Any, Any, Any], loop: SeededLoop, name: str | None, context: Any) -> None:
        self.number = loop.next_number()
        super().__init__(work, loop=loop, name=name or f"task {self.number}", context=context)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class NumberedFuture(asyncio.Future[Any]):
    """A future whose hash is its number in its loop."""

    def __init__(self, loop: SeededLoop) -> None:
        self.number = loop.next_number()
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class SeededLoop(asyncio.BaseEventLoop):
    """Runs one callback per step.

    Args:
        now: the time at which it begins, in seconds.
        shuffle: chooses which of several tasks that were woken at the same moment continues first; None: the order of asyncio.

    Attributes:
        steps: number of callbacks that have run.
        errors: what tasks and callbacks left unhandled.
    """

    def __init__(self, now: float, shuffle: Random | None = None) -> None:
        super().__init__()
        self.now = now
        self.steps = 0
        self.errors: list[str] = []
        self._numbers = 0
        self._shuffle = shuffle
        self._since_jump = 0
        self._tasks: list[NumberedTask] = []
        self.set_task_factory(self._new_task)
        self.set_exception_handler(self._on_error)

    def time(self) -> float:
        return self.now

    def next_number(self) -> int:
        """Return the number of the next task or future."""
        self._numbers += 1
        return self._numbers

    def create_future(self) -> NumberedFuture:
        return NumberedFuture(self)

    def run_steps(self, until: Callable[[], bool], most: Callable[[], int | None]) -> bool:
        """Run until the condition holds or `steps` has reached `most()`. Return whether the condition holds. Raise `Stuck`."""
        events._set_running_loop(self)
        self._thread_id = get_ident()  # type: ignore[attr-defined]
        try:
            while not until():
                last = most()
                if last is not None and self.steps >= last:
                    return False
                self._step()
            return True
        finally:
            self._thread_id = None  # type: ignore[attr-defined]
            events._set_running_loop(None)

    def abandon(self) -> None:
        """Destroy all tasks as the end of a process does. Whatever their `finally` blocks do must have no effect outside."""
        for task in self._tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                _close(task.get_coro())
        self._tasks.clear()
        self._ready.clear()  # type: ignore[attr-defined]
        self._scheduled.clear()  # type: ignore[attr-defined]
        self.close()

    def _step(self) -> None:
        ready, scheduled = self._ready, self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
        if not ready and not scheduled:
            raise Stuck("nothing is ready and no timer is set")
        if not ready:
            self.now = max(self.now, scheduled[0]._when)
            self._since_jump = 0
        while scheduled and scheduled[0]._when <= self.now:
            timer = heapq.heappop(scheduled)
            timer._scheduled = False
            ready.append(timer)
        if self._shuffle is not None and len(ready) > 1:
            self._swap(ready)
        handle = ready.popleft()
        self.steps += 1
        self._since_jump += 1
        if self._since_jump > STEPS_WITHOUT_TIME or self.steps > MOST_STEPS:
            raise Stuck("the process does not end" if self.steps > MOST_STEPS else "time does not advance")
        if not handle._cancelled:
            handle._run()

    def _swap(self, ready: Any) -> None:
        """Exchange the first two callbacks if both only wake different tasks: which is woken first is an accident."""
        first, second = (_woken(ready[index]) for index in (0, 1))
        if first is not None and second is not None and first is not second and self._shuffle.random() < 0.3:
            ready[0], ready[1] = ready[1], ready[0]

    def _new_task(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **rest: Any
    ) -> NumberedTask:
        task = NumberedTask(work, self, rest.get("name"), rest.get("context"))  # type: ignore[arg-type]
        self._tasks.append(task)
        if len(self._tasks) > 100 and self.next_number() % 50 == 0:
            self._tasks = [each for each in self._tasks if not each.done()]
        return task

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        future = context.get("task") or context.get("future")
        code = getattr(future.get_coro(), "cr_code", None) if isinstance(future, NumberedTask) else None
        # What the agents' own tasks raise is their own matter. Only agents use `gather`.
        gathered = type(future).__name__ == "_GatheringFuture"
        if not gathered and (code is None or not code.co_filename.endswith("agents.py")):
            # The text has the representation of a callback, with addresses, which differ in each run.
            message = str(context.get("message")).partition("(")[0]
            self.errors.append(f"{message}: {context.get('exception')!r}")

    def _process_events(self, event_list: Any) -> None:
        """There are no events of sockets."""

    def _write_to_self(self) -> None:
        """There are no other threads to wake the loop for."""


def _woken(handle: Any) -> object | None:
    callback = handle._callback
    task = getattr(callback, "__self__", None)
    return task if isinstance(task, NumberedTask) and "wakeup" in getattr(callback, "__name__", "") else None


def _close(work: Any) -> None:
    for _ in range(3):  # an agent may swallow GeneratorExit
        try:
            work.close()
        except BaseException:  # the end of a process has no exceptions
            continue
        return

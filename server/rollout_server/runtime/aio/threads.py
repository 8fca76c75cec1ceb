"""Threads for plain functions that nobody has to wait for at the end of a program."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock, Thread
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
_MOST = 32


class Threads(ThreadPoolExecutor):
    """What `asyncio.to_thread` uses. Python waits for the threads of its own executors before it ends, perhaps for ever.

    Subclasses the executor of threads because event loops take no other. Its threads end when there is nothing to do.
    """

    def __init__(self, most: int = _MOST) -> None:
        super().__init__(most)
        self._most = most
        self._running = 0
        self._lock = Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._closed = False

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Has a function called. Raises RuntimeError after `shutdown`."""
        future: Future[_T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the threads are shut down")
            self._jobs.append(partial(_perform, future, partial(fn, *args, **kwargs)))
            starts = self._running < self._most
            self._running += starts
        if starts:
            Thread(target=self._work, name="plain function", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes nothing more, and waits for nothing: whoever wants a result waits for its future."""
        with self._lock:
            self._closed = True
            if cancel_futures:
                self._jobs.clear()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._running -= 1
                    return
                job = self._jobs.popleft()
            job()


def _perform(future: Future[_T], call: Callable[[], _T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except StopIteration as error:  # it cannot be set on a future of asyncio: whoever awaits would wait for ever
        failure = RuntimeError("StopIteration")
        failure.__cause__ = error
        future.set_exception(failure)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)

"""Thread pool for synchronous functions that does not delay the exit of the program."""

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
    """The default executor of the event loop, used by `asyncio.to_thread`.

    Python's own thread pools are joined at exit, which may take for ever. These threads are daemons and end when they have no
    work. The class extends ThreadPoolExecutor because event loops accept no other type.
    """

    def __init__(self) -> None:
        super().__init__(_MOST)
        self._running = 0
        self._lock = Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._closed = False

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Schedule a call. Raise RuntimeError after `shutdown`."""
        future: Future[_T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the threads are shut down")
            self._jobs.append(partial(_perform, future, partial(fn, *args, **kwargs)))
            # Decided under the lock that `_work` holds when it finds no job and ends. A job is therefore never left without a
            # thread.
            starts = self._running < _MOST
            self._running += starts
        if starts:
            Thread(target=self._work, name="plain function", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse further calls. Never waits, whatever `wait` says: callers wait for their futures."""
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
    except StopIteration as error:  # asyncio futures refuse StopIteration: the awaiting task would hang
        failure = RuntimeError("StopIteration")
        failure.__cause__ = error
        future.set_exception(failure)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)

"""An event loop in its own thread: synchronous and asynchronous tests use the same local stack."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Self, TypeVar

from rollout_server.runtime.aio.event_loop import end_tasks, hold, run_forever
from rollout_server.runtime.aio.threads import Threads

T = TypeVar("T")


class LoopThread:
    """Runs coroutines on an event loop in its own thread. A context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(Threads())
        self._thread = threading.Thread(target=run_forever, args=(self._loop,), name="rollout-local-stack", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pending = self.run(end_tasks())
        if pending:
            hold(pending)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread and wait for its result. Raises the coroutine's exception.

        If the wait itself is interrupted (KeyboardInterrupt), the coroutine is cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def enter(self, manager: AbstractAsyncContextManager[T]) -> T:
        """Enter an async context manager in the thread."""
        return self.run(_enter(manager))

    def leave(self, manager: AbstractAsyncContextManager[Any]) -> None:
        """Leave a context manager that `enter` entered."""
        self.run(_leave(manager))


async def _enter(manager: AbstractAsyncContextManager[T]) -> T:
    return await manager.__aenter__()


async def _leave(manager: AbstractAsyncContextManager[Any]) -> None:
    await manager.__aexit__(None, None, None)

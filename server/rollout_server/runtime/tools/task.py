"""One running call of an author's function: a task, and threads if the function is synchronous.

An abandoned call is cancelled and not awaited. It keeps its slots until all of its parts have ended, because the slots stand
for limited resources. If it does not end within a grace period, its slots count as lost and the log says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import copy_context
from threading import Thread
from typing import Any, Final, TypeAlias, TypeVar

from rollout_server.core.message import JSON
from rollout_server.runtime.ports import Content
from rollout_server.runtime.tools.protocols import ToolContext, ToolFailed, ToolWorker
from rollout_server.runtime.tools.slots import Slots
from rollout_server.runtime.tools.toolset import ToolsetSource

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

RemoteCalls: TypeAlias = Callable[[ToolsetSource, str, Mapping[str, JSON]], Awaitable[Content]]
"""Calls a tool, given by its toolset and its name, with these arguments."""

TIMED_OUT: Final = "time limit"
"""Why a call was cancelled that took longer than its policy allows."""
GRACE_SECONDS = 5.0
"""How long a cancelled call may take to end before its slots count as lost."""


class ToolTask:
    """One call: its task, its threads, its process and the slots that it holds."""

    def __init__(
        self,
        label: str,
        slots: Sequence[Slots] = (),
        worker: ToolWorker | None = None,
        context: ToolContext | None = None,
        remote: RemoteCalls | None = None,
    ) -> None:
        """Take ownership of `slots`. `label` names the function in the log, such as "tool add (agent.py:3)".

        `context` is the rollout that calls the tool, `remote` how it calls a tool of a toolset. `ended` is set once its task and
        its threads have ended.
        """
        self._label = label
        self._slots = slots
        self._worker = worker
        self.context = context
        self._remote = remote
        self._parts = 0
        self._threads = 0
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._lost = False
        self.ended = asyncio.Event()

    def start(self, coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Start the call. Call once."""
        self._parts += 1
        task = asyncio.create_task(_contain(coroutine), name=f"call of {self._label}")
        task.add_done_callback(self._task_ended)
        self._task = task
        return task

    async def in_thread(self, work: Callable[[], object]) -> object:
        """Run a function in a new daemon thread. On cancellation the thread is abandoned."""
        loop = asyncio.get_running_loop()
        returned = loop.create_future()
        context = copy_context()

        def run() -> None:
            result: object = None
            error: BaseException | None = None
            try:
                result = context.run(work)
            except BaseException as raised:
                error = _for_future(raised)
            try:
                loop.call_soon_threadsafe(self._thread_ended, returned, result, error)
            except RuntimeError:
                return  # the loop is closed, so no task waits for the result

        # `_thread_ended` runs on this event loop, so it cannot decrement the counters before they are incremented here.
        Thread(target=run, name=self._label, daemon=True).start()
        self._parts += 1
        self._threads += 1
        return await returned

    async def in_process(self, arguments: Mapping[str, JSON], context_json: str) -> Content:
        """Run the call in the process that was opened for it."""
        if self._worker is None:
            raise ToolFailed("The tool needs its own process, which only a server starts", "RuntimeError")
        return await self._worker.call(arguments, context_json)

    async def in_toolset(self, source: ToolsetSource, name: str, arguments: Mapping[str, JSON]) -> Content:
        """Run the call in the session with its toolset."""
        if self._remote is None:
            raise ToolFailed(f"The tool {name} of {source} can only be called in a rollout of a server", "RuntimeError")
        return await self._remote(source, name, arguments)

    def cancel(self, why: str = "") -> None:
        """Cancel the call without waiting for it. `why` is the message of its `CancelledError`."""
        if self._task is not None:
            self._task.cancel(why or None)
        if self._parts and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GRACE_SECONDS, self._lose_slots)

    def _lose_slots(self) -> None:
        self._lost = True
        what = "is still running in its thread" if self._threads else "ignores its cancellation"
        _log.warning("%s %s and is abandoned with the slots it holds", self._label, what)
        for slots in self._slots:
            slots.lose()

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            task.exception()  # mark it as retrieved: the waiting task gets it as well
        self._part_ended()

    def _thread_ended(self, returned: asyncio.Future[object], result: object, error: BaseException | None) -> None:
        self._threads -= 1
        if not returned.done():
            returned.set_exception(error) if error is not None else returned.set_result(result)
        self._part_ended()

    def _part_ended(self) -> None:
        self._parts -= 1
        if self._parts:
            return
        if self._timer is not None:
            self._timer.cancel()
        for slots in self._slots:
            slots.recover() if self._lost else slots.release()
        self.ended.set()


async def _contain(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Turn SystemExit and KeyboardInterrupt into `ToolFailed`: they end the call, not the program."""
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        raise ToolFailed(_error_text(error), type(error).__name__) from error


def _for_future(error: BaseException) -> BaseException:
    """Return the error in a form that a future accepts. A future refuses StopIteration, and the waiting task would hang.

    A CancelledError from the function would look like a cancellation of the waiting task, so it is wrapped, too.
    """
    if isinstance(error, StopIteration):
        return RuntimeError("StopIteration")
    if isinstance(error, SystemExit | KeyboardInterrupt | GeneratorExit | asyncio.CancelledError):
        failed = ToolFailed(_error_text(error), type(error).__name__)
        failed.__cause__ = error
        return failed
    return error


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

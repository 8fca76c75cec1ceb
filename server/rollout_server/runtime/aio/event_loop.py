"""Runs a program's event loop and shuts it down.

No author's code can block the shutdown: neither a task that swallows its cancellation, nor a thread that never returns, nor
`sys.exit()` in a task.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from threading import Event, Thread
from typing import Any, TypeVar

from rollout_server.runtime.aio.source_location import raised_at, waits_at
from rollout_server.runtime.aio.threads import Threads

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

GRACE_SECONDS = 2.0
"""How long tasks may take to end once the program's main coroutine has returned."""


async def until_done(tasks: Collection[asyncio.Task[Any]], seconds: float) -> None:
    """Wait until a collection that its tasks leave at their end is empty, at most `seconds`. Tasks may be added meanwhile."""
    deadline = asyncio.get_running_loop().time() + seconds
    while tasks and (left := deadline - asyncio.get_running_loop().time()) > 0:
        await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)


async def first_done(*futures: asyncio.Future[Any], within: float | None = None) -> None:
    """Wait until one of the futures is done, or for at most `within` seconds. The futures go on, also on a cancellation.

    `asyncio.wait` takes three times as long.
    """
    loop = asyncio.get_running_loop()
    woken = loop.create_future()

    def wake(_: object = None) -> None:
        if not woken.done():
            woken.set_result(None)

    timer = None if within is None else loop.call_later(within, wake)
    for future in futures:
        future.add_done_callback(wake)
    try:
        await woken
    finally:
        if timer is not None:
            timer.cancel()
        for future in futures:
            future.remove_done_callback(wake)


def run(main: Coroutine[Any, Any, _T], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> _T:
    """Run a coroutine like `asyncio.run`, but with a shutdown that cannot hang. Raise what `main` raises."""
    runner = asyncio.Runner(loop_factory=loop_factory)
    loop = runner.get_loop()
    loop.set_default_executor(Threads())
    task = loop.create_task(main)
    try:
        return _run_to_end(task, lambda: runner.run(_await_task(task)))
    finally:
        ending = loop.create_task(end_tasks())
        left = _run_to_end(ending, lambda: loop.run_until_complete(ending))
        if left:
            hold(left)
            loop.close()  # not `runner.close()`, which would wait for the remaining tasks
        else:
            runner.close()


def run_forever(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped."""
    while True:
        try:
            return loop.run_forever()
        except SystemExit as error:
            _log_exit(error)


async def end_tasks() -> Collection[asyncio.Task[Any]]:
    """Cancel all tasks but the current one, wait `GRACE_SECONDS` for them, and return and log those that still run."""
    own = asyncio.current_task()
    loop = asyncio.get_running_loop()
    tasks = asyncio.all_tasks() - {own}
    for task in tasks:
        task.cancel()
    generators = loop.create_task(loop.shutdown_asyncgens(), name="end of asynchronous generators")
    await asyncio.wait({*tasks, generators}, timeout=GRACE_SECONDS)
    left = asyncio.all_tasks() - {own}
    for task in left:
        text = "%s ignores its cancellation%s; the program exits without it"
        _log.warning(text, task.get_name(), waits_at(task))
    return left


def hold(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Keep references to tasks that ignore their cancellation until the process exits.

    If such a task were garbage-collected, Python would throw GeneratorExit into it. It may swallow that, too, and then nothing
    could stop it. A sleeping daemon thread keeps its arguments alive even while the interpreter shuts down.
    """
    Thread(target=_sleep, args=(tasks,), name="tasks left", daemon=True).start()


def _sleep(_held: Collection[asyncio.Task[Any]]) -> None:
    Event().wait()


def _run_to_end(task: asyncio.Task[_T], run_loop: Callable[[], _T]) -> _T:
    """Return the result of a task.

    asyncio lets SystemExit escape from any task and stops the loop. If another task raised it, the loop is started again.
    """
    while True:
        try:
            return run_loop()
        except SystemExit as error:
            if task.done():
                raise
            _log_exit(error)


async def _await_task(task: asyncio.Task[_T]) -> _T:
    """Await an existing task: `Runner.run` accepts only coroutines, and after a SystemExit the same task has to continue."""
    return await task


def _log_exit(error: SystemExit) -> None:
    _log.error("a task called sys.exit(%r)%s; this ends the task, not the program", error.code, raised_at(error))

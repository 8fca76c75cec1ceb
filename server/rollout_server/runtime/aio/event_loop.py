"""Runs a program's event loop, and ends it. No author's code holds that up: neither a task that swallows its cancellation, nor a
thread that never returns, nor `sys.exit()` in a task of somebody's own.
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
"""How long tasks may take to give way once the program's own work is done."""


def run(main: Coroutine[Any, Any, _T], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> _T:
    """What `asyncio.run` does, but it comes to an end. Raises what `main` raises."""
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
            loop.close()  # closing the runner would wait for them
        else:
            runner.close()


def run_forever(loop: asyncio.AbstractEventLoop) -> None:
    """Runs a loop until it is stopped."""
    while True:
        try:
            return loop.run_forever()
        except SystemExit as error:
            _log_exit(error)


async def end_tasks(seconds: float = GRACE_SECONDS) -> Collection[asyncio.Task[Any]]:
    """Cancels all tasks but the current one, waits for them so long, and returns those that go on; the log names them."""
    own = asyncio.current_task()
    loop = asyncio.get_running_loop()
    tasks = asyncio.all_tasks() - {own}
    for task in tasks:
        task.cancel()
    generators = loop.create_task(loop.shutdown_asyncgens(), name="end of asynchronous generators")
    await asyncio.wait({*tasks, generators}, timeout=seconds)
    left = asyncio.all_tasks() - {own}
    for task in left:
        text = "%s does not give way to its cancellation%s; the program ends without it"
        _log.warning(text, task.get_name(), waits_at(task))
    return left


def hold(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Keeps tasks that do not give way until the process is gone.

    Collected, each would be thrown a GeneratorExit, which it may swallow, too, and that time nothing could stop it. A thread that
    sleeps holds what it is given even while the interpreter ends.
    """
    Thread(target=_sleep, args=(tasks,), name="tasks left", daemon=True).start()


def _sleep(_held: Collection[asyncio.Task[Any]]) -> None:
    Event().wait()


def _run_to_end(task: asyncio.Task[_T], run_loop: Callable[[], _T]) -> _T:
    """The result of a task. asyncio lets SystemExit out of whatever task raises it, and the loop stops for it."""
    while True:
        try:
            return run_loop()
        except SystemExit as error:
            if task.done():
                raise
            _log_exit(error)


async def _await_task(task: asyncio.Task[_T]) -> _T:
    return await task


def _log_exit(error: SystemExit) -> None:
    _log.error("a task called sys.exit(%r)%s; that ends the task, not the program", error.code, raised_at(error))

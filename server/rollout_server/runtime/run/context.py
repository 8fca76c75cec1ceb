"""What the conversations of one rollout share while it is played: its log, its end, and who still waits for something."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NoReturn, TypeVar, cast

from rollout_server.core.conversation import Conversation, State
from rollout_server.core.outcome import End
from rollout_server.core.record import Input, Record
from rollout_server.runtime.errors import AgentMistake, RolloutEnded
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.tools.slots import NoFreeSlot, Slots
from rollout_server.runtime.tools.task import ToolTask

_T = TypeVar("_T")


class RunContext:
    """One rollout on its way.

    Args:
        rollout: it.
        threads: slots for the plain functions of its agent.

    Attributes:
        state: what the agent keeps of it.
    """

    def __init__(self, rollout: Rollout, threads: Slots) -> None:
        self.rollout = rollout
        self.machine = rollout.machine
        self.ending = rollout.ending
        self.state: dict[str, Any] = {}
        self._loop = asyncio.get_running_loop()
        self._thread = get_ident()
        self._threads = threads
        self._ignored = 0
        self._waiting: set[asyncio.Task[object]] = set()

    async def check(self, conversation: Conversation, *wanted: State) -> None:
        """Raises `RolloutEnded` after the end, and `AgentMistake` where the conversation is in no state that is wanted."""
        if self.ending.is_reached:
            # Code that swallows its end and asks again must neither stop the event loop nor keep it busy.
            await asyncio.sleep(min(1.0, 0.01 * self._ignored))
            self._ignored += 1
            raise RolloutEnded(self.ending.end)
        if conversation.state is State.CLOSED:
            raise AgentMistake(
                f"the conversation is over after turn {conversation.turn}: a compaction took its place, and goes on with the Run "
                "that `fork` returned, or nobody waited for its answer"
            )
        if conversation.state not in (wanted or (State.OPEN,)):
            what = "rollout" if conversation is self.machine.main else "conversation"
            raise AgentMistake(
                f"the {what} is {conversation.state.value} in turn {conversation.turn}: await what is under way before "
                "asking for more"
            )

    def record(self, record: Input) -> tuple[Record, ...]:
        """Writes a record down, from whatever thread. Raises `RolloutEnded` after the end."""
        if get_ident() != self._thread:
            return self.wait(self._record_on_loop(record))
        if (outcome := self.machine.outcome) is not None:
            raise RolloutEnded(outcome.end)
        return self.rollout.record(record)

    def wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of a coroutine, for a thread that is not the event loop's.

        Raises what it raises, `RolloutEnded` where the rollout ends meanwhile, and `AgentMistake` on the event loop.
        """
        if get_ident() == self._thread:
            work.close()
            raise AgentMistake("run.wait is for plain functions, which run in threads; an `async def` awaits")
        returned: Future[_T] = Future()
        try:
            self._loop.call_soon_threadsafe(self._start, work, returned)
        except RuntimeError:  # the loop is closed
            work.close()
            raise RolloutEnded(self.ending.end) from None
        try:
            return returned.result()
        except CancelledError:
            raise RolloutEnded(self.ending.end) from None

    def _start(self, work: Coroutine[Any, Any, _T], returned: Future[_T]) -> None:
        """The task of a coroutine that a thread waits for. It ends with the rollout."""
        task = asyncio.ensure_future(work)
        self._waiting.add(task)
        task.add_done_callback(lambda done: self._hand_over(done, returned))

    def _hand_over(self, task: asyncio.Task[_T], returned: Future[_T]) -> None:
        self._waiting.discard(task)
        if task.cancelled():
            returned.cancel()
        elif (error := task.exception()) is not None:
            returned.set_exception(error)
        else:
            returned.set_result(task.result())

    async def _record_on_loop(self, record: Input) -> tuple[Record, ...]:
        return self.record(record)

    async def run_in_thread(self, name: str, function: Callable[[], _T]) -> _T:
        """Runs a plain function in a thread. Cancelled, it leaves the thread alone, which keeps its slot until it ends (D18).

        Raises what the function raises, and `NoFreeSlot` where all slots are held by threads that were left alone.
        """
        try:
            await self._threads.acquire()
        except NoFreeSlot:
            text = f"{name} cannot run: all {self._threads.limit} threads for plain functions are held by ones that were given up"
            raise NoFreeSlot(text) from None
        work = ToolTask(name, (self._threads,))
        task = work.start(work.in_thread(function))
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            work.cancel()
            raise
        return cast("_T", task.result())

    def end(self, end: End) -> NoReturn:
        """Ends the rollout."""
        self.ending.reach(end)
        raise RolloutEnded(end)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The current task waits for the world. What an agent started beside its `play` would otherwise outlive the rollout."""
        task = asyncio.current_task()
        entered = task is not None and task not in self._waiting
        if task is not None:
            self._waiting.add(task)
        try:
            yield
        finally:
            if task is not None and entered:
                self._waiting.discard(task)

    @property
    def under_way(self) -> Sequence[asyncio.Task[object]]:
        """The tasks that wait for the world."""
        return tuple(self._waiting)

"""State that all conversations of one running rollout share: its log, its end, and the tasks that wait for something."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from threading import get_ident
from typing import Any, NoReturn, TypeVar, cast

from rollout_server.core.conversation import Conversation, State
from rollout_server.core.outcome import End
from rollout_server.core.record import Answered, Input, Note, Record, ToolReturned
from rollout_server.runtime.activity import RolloutActivity
from rollout_server.runtime.aio.event_loop import first_done
from rollout_server.runtime.capture.endpoint import CapturePorts
from rollout_server.runtime.errors import AgentMistake, RolloutEnded
from rollout_server.runtime.models import FurtherModels, ModelUsage
from rollout_server.runtime.replay_steps import ReplayStep
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.run.tracer import NoTracer, Tracer
from rollout_server.runtime.tools.slots import NoFreeSlot, Slots
from rollout_server.runtime.tools.task import ToolTask

_T = TypeVar("_T")

calling_tool: ContextVar[str] = ContextVar("calling tool", default="")
"""The key of the tool call that the current task or thread belongs to; empty in the agent's own methods."""


def issued(draft: Input) -> Input:
    """Return a command with the tool call that issues it."""
    caller = calling_tool.get()
    return cast("Input", replace(cast("Any", draft), by_tool=caller)) if caller and hasattr(draft, "by_tool") else draft


class _Waiting:
    """The context manager of `RunContext.waiting`: several times per turn, so it is not a generator, which takes longer."""

    __slots__ = ("_activity", "_task", "_waiting", "_work")

    def __init__(self, waiting: set[asyncio.Task[object]], activity: RolloutActivity) -> None:
        self._waiting = waiting
        self._activity = activity

    def __enter__(self) -> None:
        task = asyncio.current_task()
        self._task = None if task in self._waiting else task
        if self._task is not None:
            self._waiting.add(self._task)
        self._work = self._activity.begin()

    def __exit__(self, *_: object) -> None:
        self._activity.end(self._work)
        if self._task is not None:
            self._waiting.discard(self._task)


class RunContext:
    """One running rollout.

    Args:
        rollout: the rollout.
        threads: slots for the agent's synchronous functions.
        cleanup_threads: slots for what is called after the end, so that a cleanup never waits for functions of other rollouts.
        models: the server's access to further models.
        capture_ports: what the model endpoint of the rollout needs from the outside.
        tracer: traces its completions and tool calls.

    Attributes:
        model_usage: what the rollout has used of each further model.
        before_end: functions to call right before the end of the rollout is decided.
    """

    def __init__(
        self,
        rollout: Rollout,
        threads: Slots,
        cleanup_threads: Slots,
        models: FurtherModels,
        capture_ports: CapturePorts = CapturePorts(),
        tracer: Tracer = NoTracer(),
    ) -> None:
        self.rollout = rollout
        self.machine = rollout.machine
        self.ending = rollout.ending
        self.models = models
        self.capture_ports = capture_ports
        self.tracer = tracer
        self.model_usage: dict[str, ModelUsage] = {}
        self._state: dict[str, Any] = {}
        self._used_state: set[str] = set()
        self.before_end: list[Callable[[], None]] = []
        self._loop = asyncio.get_running_loop()
        self._thread = get_ident()
        self._threads = threads
        self._cleanup_threads = cleanup_threads
        self._ignored = 0
        self._numbers = Counter[tuple[Conversation, str]]()
        self._effects: dict[Conversation, dict[object, bool]] = {}
        self._waiting: set[asyncio.Task[object]] = set()
        self._abandoned: list[ToolTask] = []

    @property
    def state(self) -> dict[str, Any]:
        """The agent's own data about this rollout."""
        self._used_state.add(calling_tool.get())
        return self._state

    def has_used_state(self, tool_call: str) -> bool:
        """Return whether a tool call, given by its key, has used `state`."""
        return tool_call in self._used_state

    async def check(self, conversation: Conversation, *allowed: State) -> None:
        """Raise `RolloutEnded` after the end, and `AgentMistake` if the conversation is in none of the given states."""
        if self.ending.is_reached:
            # An agent may swallow RolloutEnded and retry for ever. The growing sleep keeps such a loop from blocking the event
            # loop or using a whole CPU.
            await asyncio.sleep(min(1.0, 0.01 * self._ignored))
            self._ignored += 1
            raise RolloutEnded(self.ending.end)
        if conversation.state is State.CLOSED and State.CLOSED not in allowed:
            raise AgentMistake(
                f"the conversation is closed after turn {conversation.turn}: either a compaction replaced it (use the Run that "
                "`fork` returned), or its completion was abandoned"
            )
        if conversation.state not in (allowed or (State.OPEN,)):
            what = "rollout" if conversation is self.machine.main else "conversation"
            raise AgentMistake(
                f"the {what} is {conversation.state.value} in turn {conversation.turn}: await the pending operation before "
                "starting another one"
            )

    def record(self, record: Input) -> tuple[Record, ...]:
        """Append a record to the log, from any thread. Raise `RolloutEnded` after the end."""
        if get_ident() != self._thread:
            return self.wait(self._record_on_loop(issued(record)))
        record = issued(record)
        if self.ending.decided is not None or self.rollout.is_suspended:
            raise RolloutEnded(self.ending.decided or self.ending.requested.result())
        if isinstance(record, Answered | ToolReturned) and self.ending.is_interrupted:
            # The drain found that the rollout cannot continue, because the log does not have this result. That has to stay true.
            raise RolloutEnded(self.ending.requested.result())
        if isinstance(record, Note) and self.rollout.is_noted(record):
            return ()
        if self.rollout.replay is not None:
            self.rollout.replay.end_if_used_up()
        replay = self.rollout.replay
        return self.rollout.record(record) if replay is None else (replay.submit(record),)

    async def ready(
        self, conversation: Conversation, *allowed: State, ends: Callable[[], bool] = lambda: False
    ) -> bool:
        """Check as `check` does. Return whether the next command of the conversation is one that is replayed.

        If the log that is replayed has no further command of the conversation, wait until all of it is used up, or until the
        command cannot lead to a record: until `ends` raises, or returns True and all that is left are rewards and the like.
        """
        await self.check(conversation, *allowed)
        replay = self.rollout.replay
        if replay is None or replay.has_next(conversation.id):
            return replay is not None
        with self.waiting():
            await replay.over(lambda: ends() and replay.is_played)
        await self.check(conversation, *allowed)
        return False

    async def issue(self, draft: Input) -> Input:
        """Record a command, or match it with the log that is replayed and wait until that record is applied. Return the record."""
        step = self.claim(draft)
        replay = self.rollout.replay
        if replay is not None:
            with self.waiting():
                await (replay.over() if step is None else replay.applied(step))
        if step is not None:
            return step.record
        self.record(draft)
        return draft

    async def finish_replay(self, conversation: Conversation) -> None:
        """Wait until the log that is replayed is used up. If it has a further command of the conversation, the rollout fails."""
        replay = self.rollout.replay
        if replay is not None:
            replay.check_used_up(conversation.id, "finish")
            with self.waiting():
                await replay.over(lambda: replay.is_played)

    def refuse_replay(self, issued: str) -> None:
        """Let the rollout fail if it is replayed, because the agent issued something that cannot be replayed."""
        if self.rollout.replay is not None:
            raise self.rollout.replay.refuse(issued)

    def claim(self, draft: Input) -> ReplayStep | None:
        """Match a command with the log that is replayed. None: it is to be recorded, once that log is used up."""
        replay = self.rollout.replay
        return None if replay is None else replay.claim(issued(draft))

    async def claim_call(self, what: str, conversation: Conversation) -> tuple[int, ReplayStep | None]:
        """Return the number of a call, and its recorded result if the log that is replayed has one.

        `what` is "once" or the digest of a call of a model.
        """
        if calling_tool.get():
            return 0, None
        replay, key = self.rollout.replay, (conversation, what)
        self._numbers[key] += 1
        number = self._numbers[key]
        step = None if replay is None else replay.claim_call(what, conversation.id, number)
        if replay is not None and step is not None:
            with self.waiting():
                await replay.applied(step)
        return number, step

    @contextmanager
    def effect(self, conversation: Conversation) -> Iterator[Callable[[], bool]]:
        """Note that the agent's call of `once` is under way. Yields whether another one of the conversation was meanwhile."""
        calls, own = self._effects.setdefault(conversation, {}), object()
        if calls:
            calls.update(dict.fromkeys(calls, True))
        calls[own] = bool(calls)
        try:
            yield lambda: calls[own]
        finally:
            del calls[own]

    def wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of a coroutine to a thread other than the event loop's.

        Raises what the coroutine raises, `RolloutEnded` if the rollout ends meanwhile, and `AgentMistake` on the event loop.
        """
        if get_ident() == self._thread:
            work.close()
            raise AgentMistake("run.wait is for plain functions, which run in threads; use `await` in an `async def`")
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
        """Start the coroutine that a thread waits for, as a task that the driver cancels at the end of the rollout.

        A coroutine that starts after the driver's cancellation is not cancelled, but its first command raises `RolloutEnded`.
        """
        task = asyncio.ensure_future(work)
        self._waiting.add(task)
        task.add_done_callback(lambda done: self._hand_over(done, returned))

    def _hand_over(self, task: asyncio.Task[_T], returned: Future[_T]) -> None:
        """Pass the task's result to the waiting thread. Every branch completes the future, or the thread would hang."""
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
        """Run a synchronous function in a thread. On cancellation the thread is abandoned and keeps its slot until it ends (D18).

        Raises what the function raises, and `NoFreeSlot` if abandoned threads hold all slots.
        """
        threads = self._threads if self.ending.decided is None else self._cleanup_threads
        try:
            await threads.acquire()
        except NoFreeSlot:
            text = f"{name} cannot run: all {threads.limit} threads for plain functions are held by abandoned calls"
            raise NoFreeSlot(text) from None
        work = ToolTask(name, (threads,))
        task = work.start(work.in_thread(function))
        try:
            await first_done(task)
        except asyncio.CancelledError:
            work.cancel()
            self._abandoned.append(work)
            raise
        return cast("_T", task.result())

    async def threads_ended(self) -> None:
        """Wait until the abandoned threads have ended."""
        for work in self._abandoned:
            await work.ended.wait()

    def end(self, end: End) -> NoReturn:
        """End the rollout: set its end and raise `RolloutEnded`."""
        self.ending.reach(end)
        raise RolloutEnded(end)

    def waiting(self) -> AbstractContextManager[None]:
        """Mark the current task as waiting, so that the driver cancels it at the end of the rollout.

        Without it, a task that an agent started besides `play` would outlive the rollout. The context manager is reentrant:
        only the outermost use unmarks the task.
        """
        return _Waiting(self._waiting, self.rollout.activity)

    @property
    def under_way(self) -> Sequence[asyncio.Task[object]]:
        """The tasks that wait for a completion, a tool or a thread's coroutine."""
        return tuple(self._waiting)

"""The tools of a rollout for an agent that owns its loop: it calls them at the endpoint of the rollout, and the server runs them.

A tool runs under its policy and gets the rollout, as it does for other agents. The call is not in the log of the rollout: its
result is, once the agent sends it to the model. So the usage in the outcome does not count it. Metrics and traces do.

A call without a repeat key belongs to its caller, and is cancelled once the caller has left. One with a repeat key goes on, so that
its result is there when the call is repeated. The end of the rollout cancels both.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from dataclasses import dataclass, replace
from typing import Final

from rollout_server.core.error import CallRefused, NotFound, RolloutOver
from rollout_server.core.record import ToolStarted
from rollout_server.runtime.aio.event_loop import first_done
from rollout_server.runtime.capture.endpoint import MOST_CALLS, EndpointCall, too_many_calls
from rollout_server.runtime.errors import RolloutEnded, RolloutFailed
from rollout_server.runtime.ports import Tool
from rollout_server.runtime.run.context import RunContext, calling_tool
from rollout_server.runtime.tools.executor import ToolExecutor, ToolResult
from rollout_server.runtime.tools.protocols import ToolContext, is_idempotent

MOST_RESULTS: Final = 256
"""Results of calls with a repeat key that one rollout keeps. The oldest are dropped first, and the last one never."""
_MOST_CHARACTERS: Final = 16 * 1024 * 1024
"""Characters in the arguments and results of these calls, with data of images."""


@dataclass(frozen=True, slots=True)
class _RepeatableCall:
    """A call with a repeat key: what it calls, the characters of its arguments and result, and the task with its result."""

    digest: bytes
    size: int
    task: asyncio.Task[ToolResult]


class EndpointTools:
    """The tools of one rollout: a `RolloutTools`. `run` is the rollout as its tools see it."""

    def __init__(self, executor: ToolExecutor, run: ToolContext, context: RunContext) -> None:
        self._executor = executor
        self._run = run
        self._context = context
        self._running: set[asyncio.Task[ToolResult]] = set()
        self._repeatable: dict[str, _RepeatableCall] = {}
        self._callers = 0
        self._closed = False
        self.quiet_since = context.rollout.clock.monotonic()

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools, in their order."""
        return tuple(self._executor.tools)

    @property
    def idempotent(self) -> tuple[str, ...]:
        """Names of the tools whose calls are harmless to repeat."""
        return tuple(tool.name for tool in self.tools if is_idempotent(tool))

    @property
    def running(self) -> frozenset[asyncio.Task[ToolResult]]:
        """The calls that run."""
        return frozenset(self._running)

    async def call(self, call: EndpointCall) -> ToolResult:
        """Run a call and return its result: see `RolloutTools.call`."""
        ending = self._context.ending
        if self._closed or ending.is_reached or ending.is_requested:
            raise RolloutOver()
        task = self._repeated(call) or self._start(call)
        self._callers += 1
        try:
            await first_done(task, ending.requested, ending.reached)
        except asyncio.CancelledError:
            if not call.repeat_key:
                task.cancel()
            raise
        finally:
            self._callers -= 1
        if not task.done() or task.cancelled():
            task.cancel()
            raise RolloutOver()
        return task.result()

    def close(self) -> None:
        """Refuse calls, and cancel those that run."""
        self._closed = True
        for task in self._running:
            task.cancel()

    def _repeated(self, call: EndpointCall) -> asyncio.Task[ToolResult] | None:
        """Return the task of the call that this one repeats. Raise `CallRefused` if its key belongs to another call."""
        known = self._repeatable.get(call.repeat_key) if call.repeat_key else None
        if known is None:
            return None
        if known.digest != call.digest:
            text = "was used for a call of another tool, or with other arguments; use another key for each call"
            raise CallRefused("INVALID_CALL", "repeat_key", text)
        if self._callers >= MOST_CALLS:
            raise too_many_calls()
        return known.task

    def _start(self, call: EndpointCall) -> asyncio.Task[ToolResult]:
        """Start the task of a call. Raise `NotFound` and `Busy`."""
        name, names = call.call.name, [tool.name for tool in self.tools]
        if name not in names:
            known = f"there are {', '.join(names):.1000}" if names else "it has none"
            raise NotFound(f"the rollout has no tool {name!r:.100}; {known}", reason="TOOL_NOT_FOUND")
        if max(self._callers, len(self._running)) >= MOST_CALLS:
            raise too_many_calls()
        task = asyncio.create_task(self._result(call), name=f"call of {name} by rollout {self._context.rollout.uid}")
        self._running.add(task)
        if call.repeat_key:
            self._repeatable[call.repeat_key] = _RepeatableCall(call.digest, call.size, task)
        task.add_done_callback(lambda task: self._on_returned(task, call.repeat_key))
        return task

    async def _result(self, call: EndpointCall) -> ToolResult:
        """Run a call in a task of its own. Raise `RolloutOver`, also if the tool cannot be run, which ends the rollout."""
        context, rollout = self._context, self._context.rollout
        key = _key(call)
        calling_tool.set(key)  # only in this task
        began = rollout.clock.monotonic()
        try:
            with (
                context.waiting(),
                context.tracer.tool(rollout, ToolStarted(context.machine.turn, 0, call.call)) as report,
            ):
                result = await self._executor.run(call.call, self._run, key)
                report(result)
        except RolloutFailed as failed:
            context.ending.reach(failed.failure)
            raise RolloutOver() from None
        except RolloutEnded:
            raise RolloutOver() from None
        seconds = rollout.clock.monotonic() - began
        context.capture_ports.count_tool(rollout.agent, call.call.name, result.failed, seconds)
        return result

    def _on_returned(self, task: asyncio.Task[ToolResult], repeat_key: str) -> None:
        self._running.discard(task)
        self.quiet_since = self._context.rollout.clock.monotonic()
        if not task.cancelled():
            task.exception()  # its callers may all be gone; asyncio must not log that nobody saw it
        known = self._repeatable.pop(repeat_key, None)
        if known is not None:
            self._repeatable[repeat_key] = replace(known, size=known.size + _size(task))
            self._drop_results()

    def _drop_results(self) -> None:
        """Drop the oldest results beyond the bounds."""
        returned = {key: known for key, known in self._repeatable.items() if known.task.done()}
        number, size = len(returned), sum(known.size for known in returned.values())
        for key, known in [*returned.items()][:-1]:
            if number <= MOST_RESULTS and size <= _MOST_CHARACTERS:
                return
            del self._repeatable[key]
            number, size = number - 1, size - known.size


def _size(task: asyncio.Task[ToolResult]) -> int:
    """Return the approximate number of characters of a result."""
    if task.cancelled() or task.exception() is not None:
        return 0
    content = task.result().content
    return len(content) if isinstance(content, str) else sum(len(str(part)) for part in content)


def _key(call: EndpointCall) -> str:
    """Return what identifies a call in its rollout, also for other processes: a repeated one has the same key."""
    own = hashlib.sha256(call.repeat_key.encode()).hexdigest()[:32] if call.repeat_key else secrets.token_hex(16)
    return f"endpoint/{own}"

"""Runs the tool calls of one completion concurrently and records their results."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeAlias, cast

from rollout_server.core.conversation import Conversation
from rollout_server.core.message import MalformedMessage, ToolCall, tool_calls
from rollout_server.core.record import ToolReturned, ToolStarted
from rollout_server.runtime.errors import AgentMistake, RolloutFailed
from rollout_server.runtime.ports import Content
from rollout_server.runtime.replay_steps import ReplayStep
from rollout_server.runtime.run.context import RunContext, calling_tool
from rollout_server.runtime.tools.executor import ToolResult

Execute: TypeAlias = Callable[[ToolStarted], Awaitable[ToolResult]]

_AT_ONCE = 16
"""Calls that start in one iteration of the event loop, so that other rollouts run in between."""
_CANCELLED = "Error: The call was cancelled before it returned"


def call_list(calls: object) -> list[ToolCall]:
    """Return what an agent passed as calls as a list. Raise `AgentMistake` for one object, such as a reply."""
    if not isinstance(calls, Iterable):
        raise AgentMistake(f"call: pass a list of calls, such as `reply.tool_calls`, not a {type(calls).__name__}")
    return list(calls)


def checked_calls(calls: Iterable[ToolCall], conversation: Conversation) -> Sequence[ToolCall]:
    """Return the calls as a list. Raise `AgentMistake` for a call that is not an open call of the last completion."""
    wanted = list(calls)
    open_ = _open_calls(conversation)
    for call in wanted:
        if not isinstance(call, ToolCall):
            raise AgentMistake(f"call: {call!r} is not a tool call; pass calls from `reply.tool_calls`")
        if not open_[call.id]:
            raise AgentMistake(
                f"call: the model made no call {call.id!r} in turn {conversation.turn}, or the call has its result already; "
                "pass each call from `reply.tool_calls` of the last reply once"
            )
        open_[call.id] -= 1
    return wanted


def _open_calls(conversation: Conversation) -> Counter[str]:
    """Count the calls of the last completion by id, without those that have results."""
    returned: Counter[str] = Counter()
    for message in reversed(conversation.messages):
        fields = message.fields()
        if message.role == "assistant":
            try:
                called = Counter(call.id for call in tool_calls(fields))
            except MalformedMessage:
                return Counter()
            return called - returned
        if message.role == "tool":
            returned[str(fields.get("tool_call_id"))] += 1
    return Counter()


async def run_calls(context: RunContext, execute: Execute, started: Sequence[ToolStarted]) -> Sequence[ToolResult]:
    """Run calls that the machine allowed with `execute`. Raise `RolloutEnded` if the rollout ends meanwhile.

    The starts are stored before one of the calls runs, unless all of them may run again after a crash.
    """
    replayed = await _begin(context, started)
    if len(started) == 1:
        return [await _call(context, execute, started[0], replayed[0])]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_call(context, execute, *each)) for each in zip(started, replayed, strict=True)]
    return [task.result() for task in tasks]


async def _begin(context: RunContext, started: Sequence[ToolStarted]) -> Sequence[ReplayStep | None]:
    """Record the start of all calls, a few per iteration of the event loop. Return which of them are replayed.

    Cancellation in between records results for the calls that were started: every recorded start needs its result.
    """
    replayed: list[ReplayStep | None] = []
    try:
        for number, intent in enumerate(started):
            if number and number % _AT_ONCE == 0:
                await asyncio.sleep(0)
            replayed.append(await _start(context, intent))
        if not all(intent.repeatable for intent in started) and None in replayed:
            await context.rollout.stored()
    except asyncio.CancelledError:
        for begun in started[: len(replayed)]:
            _return(context, begun, None, context.rollout.clock.monotonic())
        raise
    return replayed


async def _start(context: RunContext, intent: ToolStarted) -> ReplayStep | None:
    step = context.claim(intent)
    if step is None:
        await context.issue(intent)
    return step


async def _call(context: RunContext, execute: Execute, intent: ToolStarted, replayed: ReplayStep | None) -> ToolResult:
    began = context.rollout.clock.monotonic()
    try:
        with context.waiting():
            if replayed is not None:
                recorded = await _recorded_result(context, replayed)
                if recorded is not None:
                    return recorded
            # Spread the starts over iterations of the event loop, as in `_begin`.
            for _ in range(intent.index // _AT_ONCE):
                await asyncio.sleep(0)
            with context.tracer.tool(context.rollout, intent) as report:
                result = await _run(context, execute, intent)
                report(result)
    except RolloutFailed as failed:
        context.end(failed.failure)
    except asyncio.CancelledError:
        _return(context, intent, None, began)
        raise
    _return(context, intent, result, began)
    return result


async def _recorded_result(context: RunContext, started: ReplayStep) -> ToolResult | None:
    """Return the result that the log has for a replayed call, once it is its turn; None if it has none."""
    replay = context.rollout.replay
    step = started.result if replay is None else await replay.result_of(started)
    if step is None or not isinstance(step.record, ToolReturned):
        return None
    content = cast("Content", step.record.message.fields().get("content", ""))
    return ToolResult(step.record.call, content, step.record.failed)


async def _run(context: RunContext, execute: Execute, intent: ToolStarted) -> ToolResult:
    limit = context.machine.limits.calls_per_turn
    if limit is not None and intent.index >= limit:
        text = f"Error: Too many tool calls in one turn; the first {limit} ran"
        return ToolResult(intent.call, text, failed=True)
    caller = calling_tool.set(intent.key)
    try:
        return await execute(intent)
    except RolloutFailed as failed:
        context.end(failed.failure)
    finally:
        calling_tool.reset(caller)


def _return(context: RunContext, intent: ToolStarted, result: ToolResult | None, began: float) -> None:
    """Record a result, or that the call was cancelled, unless the end of the rollout was decided: then its messages are final."""
    if context.ending.decided is not None:
        return
    shown = result or ToolResult(intent.call, _CANCELLED, failed=True)
    returned = ToolReturned(
        intent.turn,
        intent.index,
        intent.call,
        shown.message(),
        shown.failed,
        1000 * (context.rollout.clock.monotonic() - began),
        intent.segment_id,
        cancelled=result is None,
        used_state=context.has_used_state(intent.key),
    )
    context.record(returned)

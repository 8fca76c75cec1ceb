"""Runs the tool calls of one answer at the same time, and writes down how each went."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rollout_server.core.record import ToolReturned, ToolStarted
from rollout_server.runtime.course import Course
from rollout_server.runtime.toolbox import Toolbox, ToolResult


async def run_calls(course: Course, toolbox: Toolbox, started: Sequence[ToolStarted]) -> Sequence[ToolResult]:
    """Runs calls that the machine allows. Raises `RolloutOver` where the rollout ends meanwhile."""
    for intent in started:
        course.record(intent)
    if len(started) == 1:
        return [await _call(course, toolbox, started[0])]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_call(course, toolbox, intent)) for intent in started]
    return [task.result() for task in tasks]


async def _call(course: Course, toolbox: Toolbox, intent: ToolStarted) -> ToolResult:
    began = course.rollout.clock.monotonic()
    try:
        with course.waiting():
            result = await _run(course, toolbox, intent)
    except asyncio.CancelledError:
        _return(course, intent, ToolResult(intent.call, "Error: The call was given up before it returned", True), began)
        raise
    _return(course, intent, result, began)
    return result


async def _run(course: Course, toolbox: Toolbox, intent: ToolStarted) -> ToolResult:
    limit = course.machine.limits.calls_per_turn
    if limit is not None and intent.index >= limit:
        text = f"Error: Too many tool calls in one turn; the first {limit} ran"
        return ToolResult(intent.call, text, failed=True)
    return await toolbox.run(intent.call)


def _return(course: Course, intent: ToolStarted, result: ToolResult, began: float) -> None:
    if course.machine.outcome is not None:
        return
    elapsed, message = 1000 * (course.rollout.clock.monotonic() - began), result.message()
    course.record(
        ToolReturned(intent.turn, intent.index, intent.call, message, result.failed, elapsed, intent.segment_id)
    )

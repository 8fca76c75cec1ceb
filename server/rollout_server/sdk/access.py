"""Results of tools that a loop ran itself: the one thing for which the adapter looks behind the face that agents see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from rollout_server.core.machine import Over
from rollout_server.core.message import JSON, Message, ToolCall
from rollout_server.core.record import ToolReturned
from rollout_server.runtime.run import Run


async def append_results(
    run: Run, calls: Sequence[ToolCall], messages: Sequence[Mapping[str, JSON]], elapsed_ms: float
) -> Sequence[Mapping[str, JSON]]:
    """Appends the results of tool calls that the loop ran itself, as results of these calls: so events and metrics know them.

    Returns the messages that are left: those from the first on that answers none of the calls.
    """
    answering = list(_answering(calls, messages))
    if not answering:
        return messages
    await run.append()  # raises where nothing can be appended
    started = run._machine.start_calls(answering, run._conversation)
    if isinstance(started, Over):
        return messages
    for intent in started:
        run._course.record(intent)
    for intent, message in zip(started, messages, strict=False):
        failed = str(message.get("content")).startswith("Error: ")
        returned = ToolReturned(
            intent.turn, intent.index, intent.call, Message.write(message), failed, elapsed_ms, intent.segment_id
        )
        run._course.record(returned)
    return messages[len(started) :]


def _answering(calls: Sequence[ToolCall], messages: Sequence[Mapping[str, JSON]]) -> Iterator[ToolCall]:
    """The calls that the first messages answer, each once, until a message answers none."""
    open_calls = {call.id: call for call in calls}
    with suppress(KeyError):
        for message in messages:
            if message.get("role") != "tool" or not isinstance(message.get("tool_call_id"), str):
                return
            yield open_calls.pop(str(message["tool_call_id"]))

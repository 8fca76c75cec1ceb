"""Access to a run's internals for the adapter: results of tools that a loop ran itself, and token counts of a turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rollout_server.core.machine import LimitReached
from rollout_server.core.message import JSON, Message, ToolCall
from rollout_server.core.record import ToolReturned
from rollout_server.core.usage import lengths
from rollout_server.runtime.run.messages import Reply
from rollout_server.runtime.run.run import Run


async def append_results(
    run: Run, calls: Sequence[ToolCall], messages: Sequence[Mapping[str, JSON]], elapsed_ms: float
) -> tuple[Sequence[Mapping[str, JSON]], Sequence[ToolCall]]:
    """Record messages as results of tool calls that the loop ran itself, so that events and metrics include the calls.

    Args:
        run: the conversation's run.
        calls: tool calls without a result.
        messages: new messages of the conversation.
        elapsed_ms: milliseconds that the tools took together.

    Returns the remaining messages, from the first one that is not a result of these calls, and the calls still without a result.
    """
    matched = list(_matching_calls(calls, messages))
    if not matched:
        return messages, calls
    await run.append()  # appends nothing, but raises if the conversation cannot be extended
    started = run._machine.start_calls(matched, run._conversation)
    if isinstance(started, LimitReached):
        return messages, calls
    for intent in started:
        run._context.record(intent)
    for intent, message in zip(started, messages, strict=False):
        failed = str(message.get("content")).startswith("Error: ")
        returned = ToolReturned(
            intent.turn, intent.index, intent.call, Message.write(message), failed, elapsed_ms, intent.segment_id
        )
        run._context.record(returned)
    answered = {call.id for call in matched}
    return messages[len(started) :], [call for call in calls if call.id not in answered]


def usage_of(run: Run, reply: Reply) -> dict[str, int]:
    """Return the token counts of this run's last turn: prompt, completion and total; empty without token ids."""
    if reply.sampled is None:
        return {}
    generated, prompt = lengths(reply.sampled, run._conversation.line)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def _matching_calls(calls: Sequence[ToolCall], messages: Sequence[Mapping[str, JSON]]) -> Iterator[ToolCall]:
    """Yield the call of each message, in order, until a message is not the result of an open call."""
    open_calls = list(calls)
    for message in messages:
        call_id = message.get("tool_call_id") if message.get("role") == "tool" else None
        call = next((each for each in open_calls if isinstance(call_id, str) and each.id == call_id), None)
        if call is None:
            return
        open_calls.remove(call)
        yield call

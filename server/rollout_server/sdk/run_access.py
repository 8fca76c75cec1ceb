"""What the adapter looks up behind the face that agents see: results of tools that a loop ran itself, and the tokens of a turn."""

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
    """Appends the results of tool calls that the loop ran itself, as results of these calls: so events and metrics know them.

    Returns the messages that are left, from the first on that answers none of the calls, and the calls that none answers.
    """
    matched = list(_matching_calls(calls, messages))
    if not matched:
        return messages, calls
    await run.append()  # raises where nothing can be appended
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
    """The tokens of a turn of this run, the last one: its prompt, its answer and both."""
    if reply.sampled is None:
        return {}
    generated, prompt = lengths(reply.sampled, run._conversation.line)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def _matching_calls(calls: Sequence[ToolCall], messages: Sequence[Mapping[str, JSON]]) -> Iterator[ToolCall]:
    """The calls that the first messages answer, each once and in order, until a message answers none."""
    open_calls = list(calls)
    for message in messages:
        call_id = message.get("tool_call_id") if message.get("role") == "tool" else None
        call = next((each for each in open_calls if isinstance(call_id, str) and each.id == call_id), None)
        if call is None:
            return
        open_calls.remove(call)
        yield call

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
) -> Sequence[Mapping[str, JSON]]:
    """Appends the results of tool calls that the loop ran itself, as results of these calls: so events and metrics know them.

    Returns the messages that are left: those from the first on that answers none of the calls.
    """
    answering = list(_answering(calls, messages))
    if not answering:
        return messages
    await run.append()  # raises where nothing can be appended
    started = run._machine.start_calls(answering, run._conversation)
    if isinstance(started, LimitReached):
        return messages
    for intent in started:
        run._context.record(intent)
    for intent, message in zip(started, messages, strict=False):
        failed = str(message.get("content")).startswith("Error: ")
        returned = ToolReturned(
            intent.turn, intent.index, intent.call, Message.write(message), failed, elapsed_ms, intent.segment_id
        )
        run._context.record(returned)
    return messages[len(started) :]


def usage_of(run: Run, reply: Reply) -> dict[str, int]:
    """The tokens of a turn of this run, the last one: its prompt, its answer and both."""
    if reply.sampled is None:
        return {}
    generated, prompt = lengths(reply.sampled, run._conversation.line)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def _answering(calls: Sequence[ToolCall], messages: Sequence[Mapping[str, JSON]]) -> Iterator[ToolCall]:
    """The calls that the first messages answer, each once and in order, until a message answers none."""
    open_calls = list(calls)
    for message in messages:
        answers = message.get("tool_call_id") if message.get("role") == "tool" else None
        call = next((each for each in open_calls if isinstance(answers, str) and each.id == answers), None)
        if call is None:
            return
        open_calls.remove(call)
        yield call

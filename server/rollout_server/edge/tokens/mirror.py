"""A short conversation that ends as a long one does (tokens.md, R2).

What a template writes behind an answer nearly always depends on the system message, the tools and the calls that were
answered, and not on all that was said before. So the environment can be rendered behind a stand-in for the history, at a cost
that does not grow with it. Whoever uses it compares its end with the real rendering's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rollout_server.core.message import JSON
from rollout_server.edge.tokens.form import Fields, has_calls

_SAID = "Yes."


def mirrored(messages: Sequence[Fields], answered: int) -> list[Fields]:
    """System messages, a question, an answer with the same calls and empty arguments, and what came after `messages[answered]`."""
    system = [message for message in messages[:answered] if message.get("role") in ("system", "developer")]
    return [*system[:1], {"role": "user", "content": "?"}, _answer(messages[answered]), *messages[answered + 1 :]]


def mirror_length(messages: Sequence[Fields], answered: int) -> int:
    """How many messages of a mirrored conversation come before what is new."""
    return len(mirrored(messages[: answered + 1], answered))


def _answer(answer: Fields) -> Fields:
    if not has_calls(answer):
        return {"role": "assistant", "content": _SAID}
    calls = answer.get("tool_calls")
    return {"role": "assistant", "content": "", "tool_calls": list(_calls(calls if isinstance(calls, list) else []))}


def _calls(calls: Sequence[JSON]) -> Iterator[JSON]:
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping):
            yield call
            continue
        empty: JSON = "{}" if isinstance(function.get("arguments"), str) else {}
        yield {**call, "function": {**function, "arguments": empty}}

"""The messages that the model is shown, made from canonical ones: nothing that does not count is in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Literal

from rollout_server.core.capture.history import ASSISTANT, TOOL, CanonicalMessage, ImagePart
from rollout_server.core.capture.history_tree import CapturedTurn
from rollout_server.core.message import JSON

LaterSystem = Literal["system", "user"]


def render(
    messages: Sequence[CanonicalMessage], after: CapturedTurn | None, later_system: LaterSystem
) -> tuple[Mapping[str, JSON], ...]:
    """Return the JSON fields of messages in the shape of OpenAI chat completions.

    A tool result names the id that its call had in the model's completion. Ids of other calls are made from their position. The
    name of a tool in its result is kept if the client sent it: some chat templates print it.

    Args:
        messages: the messages; assistant messages in a row are joined already.
        after: the turn that they follow; None: they are a whole prompt.
        later_system: the role of system messages behind the first message. "user" joins those at the start of a prompt, and
            each other one with the user messages beside it: many templates allow only one user message in a row.
    """
    ids = _Ids(after)
    start = () if after is not None else tuple(takewhile(lambda message: message.role == "system", messages))
    if later_system == "user" and len(start) > 1:
        text = "\n\n".join(message.text for message in start)
        rendered: list[dict[str, JSON]] = [{"role": "system", "content": text}]
    else:
        rendered = [_plain(message, "system") for message in start]
    rest = messages[len(start) :]
    rendered += [_rendered(message, ids) for message in (_as_users(rest) if later_system == "user" else rest)]
    return tuple(rendered)


def _as_users(messages: Sequence[CanonicalMessage]) -> Sequence[CanonicalMessage]:
    """Return messages with each system message as one of the user, or as part of the one beside it."""
    users: list[CanonicalMessage] = []
    was_system = False
    for message in messages:
        is_system, parts = message.role == "system", message.parts
        if users and users[-1].role == "user" and (is_system or (was_system and message.role == "user")):
            before = users.pop().parts
            parts = (*before, *(["\n\n"] if before and parts else []), *parts)
        users.append(replace(message, role="user", parts=parts) if is_system or message.role == "user" else message)
        was_system = is_system
    return users


class _Ids:
    """The ids of tool calls by their number in the history."""

    def __init__(self, after: CapturedTurn | None) -> None:
        turns = () if after is None else tuple(after.lineage())
        self._sampled = {turn.first_call + n: call.id for turn in turns for n, call in enumerate(turn.message.calls)}
        self._next = 0 if after is None else after.first_call + len(after.message.calls)

    def of_new_calls(self, count: int) -> Iterator[str]:
        """Yield the ids of the calls of the next assistant message."""
        for _ in range(count):
            yield self.of(self._next)
            self._next += 1

    def of(self, number: int) -> str:
        """Return the id of a call. Some chat templates accept nothing but nine letters and digits."""
        return self._sampled.get(number) or f"call{number % 16**5:05x}"


def _rendered(message: CanonicalMessage, ids: _Ids) -> dict[str, JSON]:
    if message.role == TOOL:
        result = {**_plain(message, TOOL), "tool_call_id": ids.of(message.result_of)}
        return {**result, "name": message.name} if message.name else result
    if message.role != ASSISTANT:
        return _plain(message, message.role)
    fields = _plain(message, ASSISTANT)
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.calls:
        fields["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.sent}}
            for call, call_id in zip(message.calls, ids.of_new_calls(len(message.calls)), strict=True)
        ]
    return fields


def _plain(message: CanonicalMessage, role: str) -> dict[str, JSON]:
    return {"role": role, "content": _content(message.parts)}


def _content(parts: Iterable[str | ImagePart]) -> JSON:
    parts = tuple(parts)
    if all(isinstance(part, str) for part in parts):
        return "".join(str(part) for part in parts)
    return [_part(part) for part in parts]


def _part(part: str | ImagePart) -> JSON:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": part.url}}

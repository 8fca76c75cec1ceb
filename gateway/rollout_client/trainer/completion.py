"""Parsed completions, and their conversion to assistant messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from osmosis.rollout.v1.message_pb2 import ChatMessage, Message


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call.

    Args:
        name: name of the tool.
        arguments: JSON text exactly as generated; it may be invalid.
        id: id that the model generated; empty: an id is assigned.
    """

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class ParsedCompletion:
    """Parsed text of a completion.

    Args:
        content: the text without tool calls and reasoning.
        tool_calls: tool calls in order.
        reasoning: the reasoning ("thinking") text; None: none.
    """

    content: str
    tool_calls: Sequence[ToolCall] = ()
    reasoning: str | None = None


Parse: TypeAlias = Callable[[str], ParsedCompletion]
"""Parses the decoded text of a completion, without its stop token. Text that is no tool call or reasoning is content."""


def plain(text: str) -> ParsedCompletion:
    """Parse nothing: all text is content. For models that call no tools."""
    return ParsedCompletion(text)


def to_message(completion: ParsedCompletion, turn: int, *, typed: bool) -> Message:
    """Convert a completion to an assistant message.

    Args:
        completion: the parsed completion. Tool calls with a missing or repeated id get a new one.
        turn: turn of the completion, from 1; part of new ids.
        typed: True for the typed form (`ChatMessage`), False for the JSON form.

    Raises TypeError if `parse` returned something else than a `ParsedCompletion` of str and `ToolCall`.
    """
    if not isinstance(completion, ParsedCompletion):
        raise TypeError(f"parse must return a ParsedCompletion, not {type(completion).__name__}")
    for call in completion.tool_calls:
        if not isinstance(call, ToolCall):
            raise TypeError(f"ParsedCompletion.tool_calls must contain ToolCall, not {type(call).__name__}")
    calls = [
        (call_id, utf8_text(call.name, "ToolCall.name"), utf8_text(call.arguments, "ToolCall.arguments"))
        for call_id, call in zip(_ids(completion.tool_calls, turn), completion.tool_calls, strict=True)
    ]
    content = utf8_text(completion.content, "ParsedCompletion.content")
    reasoning = (
        utf8_text(completion.reasoning, "ParsedCompletion.reasoning") if completion.reasoning is not None else None
    )
    if typed:
        chat = ChatMessage(role="assistant", reasoning=reasoning)
        chat.parts.add(text=content)
        for call_id, name, arguments in calls:
            chat.tool_calls.add(id=call_id, name=name, arguments_json=arguments)
        return Message(chat=chat)
    fields: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        fields["reasoning_content"] = reasoning
    if calls:
        fields["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in calls
        ]
    return Message(json=json.dumps(fields, ensure_ascii=False))


def utf8_text(text: str, where: str) -> str:
    """Replace unpaired surrogates by U+FFFD, so that UTF-8 can encode the text. Raises TypeError that names `where`."""
    if not isinstance(text, str):
        raise TypeError(f"{where} must be a str, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _ids(calls: Sequence[ToolCall], turn: int) -> list[str]:
    """Return ids that are unique within the message. New ids have nine letters and digits, as Mistral's chat templates require."""
    ids: dict[str, None] = {}
    for index, call in enumerate(calls):
        wanted, number = utf8_text(call.id, "ToolCall.id"), index
        while not wanted or wanted in ids:
            wanted = f"t{turn:05d}{number:03d}"
            number += len(calls)  # this step never reaches the default id of another call
        ids[wanted] = None
    return list(ids)

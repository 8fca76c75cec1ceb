"""What a model said, parsed, and how it becomes a message of the contract."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from osmosis.rollout.v1.message_pb2 import ChatMessage, Message


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool.

    Args:
        name: the tool's name.
        arguments: their text as the model wrote it; nobody promises that it parses.
        id: as the model wrote it; empty: one is made up.
    """

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class ParsedCompletion:
    """A parsed completion.

    Args:
        content: the text without calls and thinking.
        tool_calls: in order.
        reasoning: the thinking; None: there is none.
    """

    content: str
    tool_calls: Sequence[ToolCall] = ()
    reasoning: str | None = None


Parse: TypeAlias = Callable[[str], ParsedCompletion]
"""Text of a completion, without its end token, to what it means. Text that means nothing is content."""


def plain(text: str) -> ParsedCompletion:
    """The parser for models that call no tools: all is content."""
    return ParsedCompletion(text)


def to_message(completion: ParsedCompletion, turn: int, *, typed: bool) -> Message:
    """The message, in the typed form or as JSON. Calls without an id, or with one that is taken, get one of their own.

    Raises TypeError for what is no completion.
    """
    if not isinstance(completion, ParsedCompletion):
        raise TypeError(f"parse must return a ParsedCompletion, not {type(completion).__name__}")
    for call in completion.tool_calls:
        if not isinstance(call, ToolCall):
            raise TypeError(f"ParsedCompletion.tool_calls must hold ToolCalls, not {type(call).__name__}")
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
    """A text that UTF-8 can carry: halves of surrogate pairs become U+FFFD. Raises TypeError, which names the place, for none."""
    if not isinstance(text, str):
        raise TypeError(f"{where} must be a str, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _ids(calls: Sequence[ToolCall], turn: int) -> list[str]:
    """Ids, unique within the message. Those made up have the nine letters and digits that Mistral's templates insist on."""
    ids: dict[str, None] = {}
    for index, call in enumerate(calls):
        wanted, number = utf8_text(call.id, "ToolCall.id"), index
        while not wanted or wanted in ids:
            wanted = f"t{turn:05d}{number:03d}"
            number += len(calls)
        ids[wanted] = None
    return list(ids)

"""Conversations to render with a template, as they stand on the wire, and those of a file: one JSON value on each line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rollout_server.core.message import JSON, MalformedMessage, Message, parse_json, parse_object
from rollout_server.edge.tokens.rendering_form import Fields, has_calls

_NUMBER: JSON = {"type": "number"}
_TEXT: JSON = {"type": "string"}


KIND = "yours"


def _tool(name: str, description: str, properties: dict[str, JSON]) -> Fields:
    schema: JSON = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS: tuple[Fields, ...] = (
    _tool("add", "Adds two numbers.", {"a": _NUMBER, "b": _NUMBER}),
    _tool("find", "Finds places.", {"query": _TEXT}),
)


@dataclass(frozen=True, slots=True)
class CheckConversation:
    """Messages, and what is known of how they came about.

    Args:
        kind: the row that it counts in.
        messages: `arguments` are text, spelled as the model did.
        tools: as OpenAI writes function tools; None and an empty list are not the same to every template.
        cut: indices of answers that were cut by length, so that the model wrote no stop.
    """

    kind: str
    messages: tuple[Fields, ...]
    tools: Sequence[Fields] | None = TOOLS
    cut: frozenset[int] = frozenset()

    @property
    def completions(self) -> tuple[int, ...]:
        """Indices of the model's messages."""
        return tuple(i for i, message in enumerate(self.messages) if message.get("role") == "assistant")

    @property
    def has_calls(self) -> bool:
        """Whether the model calls a tool anywhere in it."""
        return any(map(has_calls, self.messages))

    def normal(self) -> CheckConversation | None:
        """The same with arguments spelled as most templates spell an object. None where one cannot be spelled so."""
        try:
            return replace(self, messages=tuple(map(_normal, self.messages)))
        except ValueError:
            return None

    def end(self, last: int) -> int:
        """How many messages there are when the model is asked again after `messages[answered]`."""
        return next((index for index in self.completions if index > last), len(self.messages))


def template_spelling(arguments: str) -> str:
    """A JSON object as most templates spell it. Raises ValueError for other texts, and for numbers that JSON cannot spell."""
    return json.dumps(parse_object(arguments), ensure_ascii=False, allow_nan=False)


def arguments_of(message: Fields) -> list[str]:
    """The arguments of its calls, where they are text."""
    texts = [function.get("arguments") for function in _functions(message)]
    return [arguments for arguments in texts if isinstance(arguments, str)]


def tool_names(message: Fields) -> list[str]:
    """The tools that it calls."""
    return [str(function.get("name")) for function in _functions(message)]


def reasoning_of(message: Fields) -> str:
    """What the model thought before it answered, wherever it stands; empty: nothing."""
    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str) and reasoning.strip():
        return reasoning.strip()
    content = message.get("content")
    if isinstance(content, str) and "</think>" in content:
        return content.partition("</think>")[0].rpartition("<think>")[2].strip()
    return ""


def _functions(message: Fields) -> list[Fields]:
    calls = message.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [function for function in functions if isinstance(function, dict)]


def _normal(message: Fields) -> Fields:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_normal_call(call) for call in calls]}


def _normal_call(call: JSON) -> JSON:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = template_spelling(function["arguments"])
    except MalformedMessage:  # not an object, so that no parser would touch it
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def read_conversations(path: Path) -> list[CheckConversation]:
    """Each line is an object with `messages` and perhaps `tools`, or a list of messages, which are given the built-in tools.

    Raises ValueError that names the line, and what cannot be read of it; OSError where there is no such file.
    """
    found = list(_lines(path))
    if not found:
        raise ValueError(f"{path} holds no conversation")
    return found


def _lines(path: Path) -> Iterator[CheckConversation]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8") from None
    # Only a line feed ends a line: JSON strings may hold the other characters at which `splitlines` cuts.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield _conversation(parse_json(line), f"{KIND}, line {number}")
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None


def _conversation(value: JSON, kind: str) -> CheckConversation:
    fields_of_line = value if isinstance(value, dict) else {"messages": value, "tools": list(TOOLS)}
    messages, tools = fields_of_line.get("messages"), fields_of_line.get("tools")
    if not isinstance(messages, list) or not messages:
        raise MalformedMessage('a list of messages is needed, or an object with one under "messages"')
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise MalformedMessage("tools is not a list of objects")
    fields = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise MalformedMessage(f"messages[{index}] is not an object")
        try:
            Message.parsed("", message)
        except MalformedMessage as error:
            raise MalformedMessage(f"messages[{index}]: {error}") from None
        fields.append(message)
    conversation = CheckConversation(
        kind, tuple(fields), tools if tools is None else tuple(t for t in tools if isinstance(t, dict))
    )
    if not any(index + 1 < len(fields) for index in conversation.completions):
        raise MalformedMessage("no message follows an answer of the role assistant, so there is nothing to look at")
    return conversation

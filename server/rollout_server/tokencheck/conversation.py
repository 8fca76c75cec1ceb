"""Conversations to render with a template, built-in or read from a JSON lines file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rollout_server.core.message import JSON, MalformedMessage, Message, parse_json, parse_object
from rollout_server.edge.tokens.rendering_form import Fields, has_calls

_NUMBER: JSON = {"type": "number"}
_TEXT: JSON = {"type": "string"}


KIND = "custom"


def _tool(name: str, description: str, properties: dict[str, JSON]) -> Fields:
    schema: JSON = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS: tuple[Fields, ...] = (
    _tool("add", "Adds two numbers.", {"a": _NUMBER, "b": _NUMBER}),
    _tool("find", "Finds places.", {"query": _TEXT}),
)


@dataclass(frozen=True, slots=True)
class CheckConversation:
    """A conversation in the format of the API, with facts about its origin.

    Args:
        kind: the row of the report that it belongs to.
        messages: tool call `arguments` are JSON text as the model wrote it.
        tools: in OpenAI's format for function tools. Some templates render None and an empty list differently.
        cut: indices of completions that were cut at `max_tokens`, so that the model wrote no stop token.
    """

    kind: str
    messages: tuple[Fields, ...]
    tools: Sequence[Fields] | None = TOOLS
    cut: frozenset[int] = frozenset()

    @property
    def completions(self) -> tuple[int, ...]:
        """Indices of the assistant messages."""
        return tuple(i for i, message in enumerate(self.messages) if message.get("role") == "assistant")

    @property
    def has_calls(self) -> bool:
        """True if any message has tool calls."""
        return any(map(has_calls, self.messages))

    def normal(self) -> CheckConversation | None:
        """Return the conversation with arguments in the spelling of most templates; None if JSON cannot express one of them."""
        try:
            return replace(self, messages=tuple(map(_normal, self.messages)))
        except ValueError:
            return None

    def end(self, last: int) -> int:
        """Return the number of messages in the next prompt after `messages[last]`."""
        return next((index for index in self.completions if index > last), len(self.messages))


def template_spelling(arguments: str) -> str:
    """Return a JSON object in the spelling of most templates. Raises ValueError for other texts and for non-finite numbers."""
    return json.dumps(parse_object(arguments), ensure_ascii=False, allow_nan=False)


def arguments_of(message: Fields) -> list[str]:
    """Return the arguments of the message's calls that are text."""
    texts = [function.get("arguments") for function in _functions(message)]
    return [arguments for arguments in texts if isinstance(arguments, str)]


def tool_names(message: Fields) -> list[str]:
    """Return the names of the called tools."""
    return [str(function.get("name")) for function in _functions(message)]


def reasoning_of(message: Fields) -> str:
    """Return the model's reasoning, from `reasoning_content` or from `<think>` in the content; "" if there is none."""
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
    except MalformedMessage:  # not a JSON object: a tool call parser would pass it on unchanged
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def read_conversations(path: Path) -> list[CheckConversation]:
    """Read conversations from a JSON lines file.

    Each line is an object with `messages` and optionally `tools`, or a list of messages, which get the built-in tools. Raises
    ValueError with the line and the error, and OSError if the file cannot be read.
    """
    found = list(_lines(path))
    if not found:
        raise ValueError(f"{path} contains no conversation")
    return found


def _lines(path: Path) -> Iterator[CheckConversation]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8") from None
    # Split at line feeds only: JSON strings may contain other characters that `splitlines` splits at, such as U+2028.
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
        raise MalformedMessage("no message follows an assistant message, so there is no turn boundary to check")
    return conversation

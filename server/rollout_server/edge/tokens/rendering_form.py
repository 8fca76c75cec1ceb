"""How a trainer renders a conversation and counts its new tokens (docs/design.md, R6a)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from rollout_server.core.message import JSON, Message
from rollout_server.core.outcome import Category, Failure, FailureClass
from rollout_server.runtime.errors import PromptRefused

Fields: TypeAlias = Mapping[str, JSON]
"""A parsed message: a JSON object."""


class Tools(Enum):
    """The `tools` argument that a trainer passes to its chat template.

    `None` and an empty list both mean "no tools", but some templates (Llama 3) render them differently.
    """

    TOLD = "told"
    NONE = "none"
    EMPTY = "empty"


class Arguments(Enum):
    """The form in which a trainer passes tool call `arguments` to its template: the received JSON text, or the parsed object.

    OpenAI's API carries `arguments` as a string. Some templates apply `tojson` to it and so encode a string a second time;
    others accept only an object.
    """

    RECEIVED = "received"
    PARSED = "parsed"


class CountingMethod(Enum):
    """How a trainer counts new tokens: by the growth of the full rendering, or by the tokens that it appended to its own."""

    RENDERED = "rendered"
    APPENDED = "appended"


@dataclass(frozen=True, slots=True)
class RenderingForm:
    """The way in which a trainer renders and counts."""

    tools: Tools = Tools.TOLD
    arguments: Arguments = Arguments.RECEIVED
    measure: CountingMethod = CountingMethod.RENDERED

    def convert_tools(self, tools: Sequence[Fields]) -> Sequence[Fields] | None:
        """Return the `tools` argument of the template, for a rollout with these tools."""
        match self.tools:
            case Tools.TOLD:
                return tools or None
            case Tools.NONE:
                return None
            case Tools.EMPTY:
                return ()

    def with_other_arguments(self) -> RenderingForm:
        """Return the form that differs only in `arguments`."""
        received = self.arguments is Arguments.RECEIVED
        return replace(self, arguments=Arguments.PARSED if received else Arguments.RECEIVED)

    def others(self) -> Iterator[RenderingForm]:
        """Yield all other forms, ordered by the number of fields in which they differ."""
        forms = [
            RenderingForm(tools, arguments, measure)
            for measure in CountingMethod
            for arguments in Arguments
            for tools in Tools
        ]
        for distance in (1, 2, 3):
            yield from (form for form in forms if self._distance(form) == distance)

    def _distance(self, other: RenderingForm) -> int:
        return (
            (self.tools is not other.tools)
            + (self.arguments is not other.arguments)
            + (self.measure is not other.measure)
        )


def parsed(message: Message, index: int, arguments: Arguments) -> Fields:
    """Return the message as it is passed to a template.

    Raises `PromptRefused` (VALIDATION) for content that is not text.
    """
    fields = message.fields()
    content = fields.get("content")
    for place, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = str(part.get("type", "untyped"))[:40] if isinstance(part, Mapping) else type(part).__name__
            reason = f"messages[{index}].content[{place}] is not text ({kind}); only text content can be tokenized"
            raise PromptRefused(Failure(Category.VALIDATION, reason, source=FailureClass.ENVIRONMENT))
    calls = fields.get("tool_calls")
    if arguments is Arguments.PARSED and isinstance(calls, list):
        return {**fields, "tool_calls": [_with_object(call) for call in calls]}
    return fields


def with_names(messages: Iterable[Fields], before: Sequence[Fields] = ()) -> Iterator[Fields]:
    """Yield messages, each tool result with the name of its tool.

    The tool is that of the call with the result's `tool_call_id` in the nearest assistant message before the result. A result that
    has a name keeps it. A result of no such call, or of two calls of different tools that share an id, gets none.

    Args:
        messages: the messages.
        before: the messages before them.
    """
    names = next((_call_names(message) for message in reversed(before) if message.get("role") == "assistant"), {})
    for message in messages:
        if message.get("role") == "assistant":
            names = _call_names(message)
        elif message.get("role") == "tool" and not message.get("name"):
            call_id = message.get("tool_call_id")
            name = names.get(call_id) if isinstance(call_id, str) else None
            yield message if name is None else {**message, "name": name}
            continue
        yield message


def with_content(message: Fields) -> Fields:
    """Return a completion without content with an empty one. Other messages stay as they are."""
    needed = message.get("role") == "assistant" and message.get("content") is None
    return {**message, "content": ""} if needed else message


def strings(value: JSON) -> Iterator[str]:
    """Yield all strings in a JSON value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from strings(each)
    elif isinstance(value, Sequence):
        for each in value:
            yield from strings(each)


def has_calls(fields: Fields) -> bool:
    """Return whether the message contains tool calls."""
    return bool(fields.get("tool_calls"))


def _call_names(message: Fields) -> Mapping[str, str | None]:
    """Return the names of the called tools by call id; None for an id with several names."""
    names: dict[str, str | None] = {}
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping):
            continue
        call_id, name = call.get("id"), function.get("name")
        if isinstance(call_id, str) and isinstance(name, str):
            names[call_id] = name if names.get(call_id, name) == name else None
    return names


def _with_object(call: JSON) -> JSON:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:  # json.loads, as trainers' HTTP servers use it: it also reads NaN and Infinity, which are not JSON
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": value}} if isinstance(value, dict) else call

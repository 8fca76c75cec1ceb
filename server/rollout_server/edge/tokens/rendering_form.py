"""How a trainer renders a conversation and counts what is new in it (docs/design.md, R6a)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from rollout_server.core.message import JSON, Message
from rollout_server.core.outcome import Category, Failure
from rollout_server.runtime.errors import RolloutFailed

Fields: TypeAlias = Mapping[str, JSON]
"""A message, parsed."""


class Tools(Enum):
    """What a trainer gives its template for tools. No tools can be said in two ways, which some templates render differently."""

    TOLD = "told"
    NONE = "none"
    EMPTY = "empty"


class Arguments(Enum):
    """In which form a trainer gives its template the arguments of calls: as the text that came, or as the object it says."""

    RECEIVED = "received"
    PARSED = "parsed"


class CountingMethod(Enum):
    """What a trainer counts: how much longer its rendering got, or the tokens that it appended to those it kept."""

    RENDERED = "rendered"
    APPENDED = "appended"


@dataclass(frozen=True, slots=True)
class RenderingForm:
    """How a trainer renders and counts."""

    tools: Tools = Tools.TOLD
    arguments: Arguments = Arguments.RECEIVED
    measure: CountingMethod = CountingMethod.RENDERED

    def convert_tools(self, tools: Sequence[Fields]) -> Sequence[Fields] | None:
        """What the template is given for tools, where the rollout has these."""
        match self.tools:
            case Tools.TOLD:
                return tools or None
            case Tools.NONE:
                return None
            case Tools.EMPTY:
                return ()

    def with_other_arguments(self) -> RenderingForm:
        """The form that differs in the arguments of calls only."""
        received = self.arguments is Arguments.RECEIVED
        return replace(self, arguments=Arguments.PARSED if received else Arguments.RECEIVED)

    def others(self) -> Iterator[RenderingForm]:
        """All other forms, those that differ in one thing first."""
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
    """The message as a template is given it. Raises `RolloutFailed` (VALIDATION) for content that is not text."""
    fields = message.fields()
    content = fields.get("content")
    for place, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = str(part.get("type", "untyped"))[:40] if isinstance(part, Mapping) else type(part).__name__
            reason = f"messages[{index}].content[{place}] is not text ({kind}): images and the like cannot be counted in tokens"
            raise RolloutFailed(Failure(Category.VALIDATION, reason))
    calls = fields.get("tool_calls")
    if arguments is Arguments.PARSED and isinstance(calls, list):
        return {**fields, "tool_calls": [_with_object(call) for call in calls]}
    return fields


def strings(value: JSON) -> Iterator[str]:
    """All strings in a message, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from strings(each)
    elif isinstance(value, Sequence):
        for each in value:
            yield from strings(each)


def has_calls(fields: Fields) -> bool:
    """Whether the message holds calls."""
    return bool(fields.get("tool_calls"))


def _with_object(call: JSON) -> JSON:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:  # as the fronts of trainers do: NaN and the like, which JSON does not know, are read too
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": value}} if isinstance(value, dict) else call

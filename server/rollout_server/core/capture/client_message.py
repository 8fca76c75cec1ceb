"""The assistant message that an agent's client gets for a completion."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rollout_server.core.message import JSON, Message

_REASONING = ("reasoning", "thinking")


def client_message(message: Message) -> str:
    """Return a completion's message as JSON in the shape of OpenAI chat completions.

    It is the trainer's text, verbatim, unless the trainer sent arguments as an object or the reasoning under another name.
    """
    fields = message.fields()
    try:
        shaped = {**fields, **_reasoning(fields), **_tool_calls(fields)}
        return message.text if shaped == fields else json.dumps(shaped, ensure_ascii=False, allow_nan=False)
    except ValueError:  # an integer with so many digits that it was read as infinite
        return message.text


def _reasoning(fields: Mapping[str, JSON]) -> Mapping[str, JSON]:
    given = next((text for name in _REASONING if isinstance(text := fields.get(name), str)), None)
    return {} if given is None or fields.get("reasoning_content") is not None else {"reasoning_content": given}


def _tool_calls(fields: Mapping[str, JSON]) -> Mapping[str, JSON]:
    calls = fields.get("tool_calls")
    return {"tool_calls": [_tool_call(call) for call in calls]} if isinstance(calls, list) else {}


def _tool_call(call: JSON) -> JSON:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or isinstance(function.get("arguments"), str):
        return call
    given = function.get("arguments")
    arguments = "" if given is None else json.dumps(given, ensure_ascii=False, allow_nan=False)
    return {**call, "function": {**function, "arguments": arguments}}

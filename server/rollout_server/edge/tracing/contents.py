"""Messages, arguments and results as the conventions write them. They are exported only if the operator asks for them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence

from rollout_server.core.message import JSON, MalformedMessage, Message
from rollout_server.core.record import Answered, ModelCalled, Record
from rollout_server.edge.tracing.conventions import CAPTURE_CONTENT, CAPTURES
from rollout_server.runtime.ports import Content


def captures_content() -> bool:
    """Return whether the environment asks for contents in spans."""
    return os.environ.get(CAPTURE_CONTENT, "").strip().lower() in CAPTURES


def input_messages(messages: Iterable[Message]) -> str:
    """Return the conversation that a model is sent, as JSON."""
    return _json([_message(message) for message in messages])


def output_messages(records: Iterable[Record]) -> str:
    """Return the message that a model wrote, as JSON; empty without one."""
    for record in records:
        if isinstance(record, Answered | ModelCalled):
            written = {**_message(record.message), "finish_reason": record.finish_reason}
            return _json([written])
    return ""


def tool_text(value: JSON | Content) -> str:
    """Return the arguments of a call as the model wrote them, or the result of a tool."""
    return value if isinstance(value, str) else _json(value)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _message(message: Message) -> dict[str, object]:
    try:
        fields = message.fields()
    except MalformedMessage:
        return {"role": message.role, "parts": []}
    if message.role == "tool":
        response = {"type": "tool_call_response", "id": fields.get("tool_call_id"), "response": fields.get("content")}
        return {"role": "tool", "parts": [response]}
    return {"role": message.role, "parts": [*_texts(fields.get("content")), *_calls(fields.get("tool_calls"))]}


def _texts(content: object) -> Iterable[Mapping[str, object]]:
    if isinstance(content, str):
        yield {"type": "text", "content": content}
    elif isinstance(content, Sequence):
        for part in content:
            if isinstance(part, Mapping):  # of images and the like only the kind
                text = {"content": part["text"]} if "text" in part else {}
                yield {"type": part.get("type"), **text}


def _calls(calls: object) -> Iterable[Mapping[str, object]]:
    for call in calls if isinstance(calls, Sequence) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            given = {"name": function.get("name"), "arguments": function.get("arguments")}
            yield {"type": "tool_call", "id": call.get("id"), **given}

"""Messages in their two forms (D13).

The JSON form is verbatim text on both sides. The typed form becomes the JSON object that OpenAI-style endpoints know; on the way
back, a message that the typed form cannot carry (unknown keys, null beside absent) stays JSON.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence

from osmosis.rollout.v1 import message_pb2

from rollout_server.core.error import Violation
from rollout_server.core.message import JSON, MalformedMessage, Message, parse_object
from rollout_server.runtime.port import Tool

MAX_JSON_BYTES = 8 * 1024 * 1024
_TYPED_KEYS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content"})
_CALL_KEYS = frozenset({"id", "type", "function"})


def messages_from_proto(
    messages: Sequence[message_pb2.Message], where: str
) -> tuple[tuple[Message, ...], bool, list[Violation]]:
    """Messages, whether they came in the typed form, and what is wrong with them."""
    wrong: list[Violation] = []
    parsed: list[Message] = []
    forms = {message.WhichOneof("form") for message in messages}
    if len(forms - {None}) > 1:
        wrong.append(Violation(where, "are in two forms; send all as `json` or all as `chat`"))
    for index, message in enumerate(messages):
        try:
            parsed.append(message_from_proto(message))
        except MalformedMessage as error:
            wrong.append(Violation(f"{where}[{index}]", str(error)))
    return tuple(parsed), "chat" in forms, wrong


def message_from_proto(message: message_pb2.Message) -> Message:
    """One message. Raises `MalformedMessage`."""
    form = message.WhichOneof("form")
    if form is None:
        raise MalformedMessage("needs `json` or `chat`")
    text = message.json if form == "json" else _chat_to_json(message.chat)
    if len(text) > MAX_JSON_BYTES:
        raise MalformedMessage(f"has {len(text)} bytes, at most {MAX_JSON_BYTES} are allowed")
    return Message.parse(text)


def message_to_proto(message: Message, *, typed: bool) -> message_pb2.Message:
    """One message in the form that its rollout began with."""
    if typed:
        chat = _json_to_chat(message)
        if chat is not None:
            return message_pb2.Message(chat=chat)
    return message_pb2.Message(json=message.text)


def messages_to_proto(messages: Iterable[Message], *, typed: bool) -> list[message_pb2.Message]:
    """Messages in the form that their rollout began with."""
    return [message_to_proto(message, typed=typed) for message in messages]


def tool_to_proto(tool: Tool) -> message_pb2.Tool:
    """A tool as its model is told."""
    return message_pb2.Tool(
        name=tool.name, description=tool.description, parameters_json_schema=tool.parameters_json_schema
    )


def _chat_to_json(chat: message_pb2.ChatMessage) -> str:
    """Writes the JSON form by hand, so that parts and arguments which are JSON already go in as they are."""
    fields = [("role", _write(chat.role))]
    if len(chat.parts) == 1 and chat.parts[0].WhichOneof("part") == "text":
        fields.append(("content", _write(chat.parts[0].text)))
    elif chat.parts:
        fields.append(("content", f"[{', '.join(_part_to_json(part) for part in chat.parts)}]"))
    for name, key in (("name", "name"), ("reasoning", "reasoning_content")):
        if chat.HasField(name):  # type: ignore[arg-type]
            fields.append((key, _write(getattr(chat, name))))
    if chat.tool_calls:
        fields.append(("tool_calls", f"[{', '.join(_call_to_json(call) for call in chat.tool_calls)}]"))
    if chat.HasField("tool_call_id"):
        fields.append(("tool_call_id", _write(chat.tool_call_id)))
    return "{" + ", ".join(f'"{key}": {value}' for key, value in fields) + "}"


def _part_to_json(part: message_pb2.ContentPart) -> str:
    match part.WhichOneof("part"):
        case "text":
            return _write({"type": "text", "text": part.text})
        case "json":
            parse_object(part.json)
            return part.json
        case "blob":
            return _write(_blob(part.blob))
        case _:
            raise MalformedMessage("a content part needs `text`, `blob` or `json`")


def _blob(blob: message_pb2.Blob) -> JSON:
    if blob.WhichOneof("source") is None:
        raise MalformedMessage("a blob needs `inline` or `uri`")
    kind, _, subtype = blob.media_type.partition("/")
    encoded = base64.b64encode(blob.inline).decode("ascii")
    if kind == "audio" and blob.WhichOneof("source") == "inline":
        return {"type": "input_audio", "input_audio": {"data": encoded, "format": subtype}}
    uri = blob.uri if blob.WhichOneof("source") == "uri" else f"data:{blob.media_type};base64,{encoded}"
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": uri}}
    return {"type": "file", "file": {"file_data": uri}}


def _call_to_json(call: message_pb2.ToolCall) -> str:
    return _write(
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
    )


def _write(value: JSON) -> str:
    return json.dumps(value, ensure_ascii=False)


def _json_to_chat(message: Message) -> message_pb2.ChatMessage | None:
    """The typed form, or None where it would lose something."""
    fields = message.fields()
    if not fields.keys() <= _TYPED_KEYS or any(fields[key] is None for key in fields):
        return None
    chat = message_pb2.ChatMessage(role=message.role)
    parts = _parts(fields["content"]) if "content" in fields else []
    calls = _calls(fields.get("tool_calls", []))
    if parts is None or calls is None:
        return None
    chat.parts.extend(parts)
    chat.tool_calls.extend(calls)
    for key, name in (("tool_call_id", "tool_call_id"), ("name", "name"), ("reasoning_content", "reasoning")):
        if key in fields:
            value = fields[key]
            if not isinstance(value, str):
                return None
            setattr(chat, name, value)
    return chat


def _parts(content: JSON) -> list[message_pb2.ContentPart] | None:
    if isinstance(content, str):
        return [message_pb2.ContentPart(text=content)]
    if not isinstance(content, list) or not content:
        return None
    parts: list[message_pb2.ContentPart] = []
    for part in content:
        if not isinstance(part, Mapping):
            return None
        text = part.get("text")
        if len(content) > 1 and part.keys() == {"type", "text"} and part["type"] == "text" and isinstance(text, str):
            parts.append(message_pb2.ContentPart(text=text))
        else:
            parts.append(message_pb2.ContentPart(json=_write(part)))
    return parts


def _calls(calls: JSON) -> list[message_pb2.ToolCall] | None:
    if not isinstance(calls, list):
        return None
    typed: list[message_pb2.ToolCall] = []
    for call in calls:
        if not isinstance(call, Mapping) or not call.keys() <= _CALL_KEYS or call.get("type", "function") != "function":
            return None
        function, call_id = call.get("function"), call.get("id")
        if (
            not isinstance(function, Mapping)
            or function.keys() != {"name", "arguments"}
            or not isinstance(call_id, str)
        ):
            return None
        name, arguments = function["name"], function["arguments"]
        if not isinstance(name, str) or arguments is None:
            return None
        text = arguments if isinstance(arguments, str) else _write(arguments)
        typed.append(message_pb2.ToolCall(id=call_id, name=name, arguments_json=text))
    return typed

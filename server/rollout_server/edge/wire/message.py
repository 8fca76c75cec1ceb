"""Messages in their two forms (D13).

The JSON form is verbatim text on both sides. The typed form becomes the JSON object that OpenAI-style endpoints know; on the way
back, a message that the typed form cannot carry (unknown keys, null beside absent) stays JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from osmosis.rollout.v1 import message_pb2

from rollout_server.core.error import Violation
from rollout_server.core.message import (
    JSON,
    MAX_VALUES,
    MalformedMessage,
    Message,
    first_too_many,
    parse_object,
    utf8_length,
)
from rollout_server.edge.wire.blob import blob_to_fields, fields_to_blob
from rollout_server.runtime.ports import Tool

MAX_JSON_BYTES = 8 * 1024 * 1024
MAX_VIOLATIONS = 20
_TYPED_KEYS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content"})
_CALL_KEYS = frozenset({"id", "type", "function"})


def messages_from_proto(
    messages: Sequence[message_pb2.Message], where: str
) -> tuple[tuple[Message, ...], bool, list[Violation]]:
    """Messages, whether they came in the typed form, and what is wrong with them, up to `MAX_VIOLATIONS`."""
    wrong: list[Violation] = []
    parsed: list[Message] = []
    forms = {message.WhichOneof("form") for message in messages}
    if len(forms - {None}) > 1:
        wrong.append(Violation(where, "are in two forms; send all as `json` or all as `chat`"))
    too_many = first_too_many([message.json for message in messages])
    if too_many is not None:
        text = f"is the first with which all messages hold more than {MAX_VALUES} JSON values, the most that is taken"
        return (), False, [Violation(f"{where}[{too_many}]", text)]
    for index, message in enumerate(messages):
        try:
            parsed.append(message_from_proto(message))
        except MalformedMessage as error:
            wrong.append(Violation(f"{where}[{index}]", str(error)))
            if len(wrong) >= MAX_VIOLATIONS:
                break
    return tuple(parsed), "chat" in forms, wrong


def message_from_proto(message: message_pb2.Message) -> Message:
    """One message. Raises `MalformedMessage`."""
    form = message.WhichOneof("form")
    if form is None:
        raise MalformedMessage("needs `json` or `chat`")
    text = message.json if form == "json" else _chat_to_json(message.chat)
    size = utf8_length(text)
    if size > MAX_JSON_BYTES:
        raise MalformedMessage(f"has {size} bytes, at most {MAX_JSON_BYTES} are allowed")
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
            return _write(blob_to_fields(part.blob))
        case _:
            raise MalformedMessage("a content part needs `text`, `blob` or `json`")


def _call_to_json(call: message_pb2.ToolCall) -> str:
    return _write(
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
    )


def _write(value: JSON) -> str:
    return json.dumps(value, ensure_ascii=False)


def _json_to_chat(message: Message) -> message_pb2.ChatMessage | None:
    """The typed form, or None where it would lose something."""
    fields = message.fields()
    if not fields.keys() <= _TYPED_KEYS or any(value is None or value == [] for value in fields.values()):
        return None
    chat = message_pb2.ChatMessage(role=message.role)
    parts = _parts(fields["content"], message.text) if "content" in fields else []
    calls = _calls(fields.get("tool_calls", []))
    if parts is None or calls is None:
        return None
    chat.parts.extend(parts)
    chat.tool_calls.extend(calls)
    for key, name in (("tool_call_id", "tool_call_id"), ("name", "name"), ("reasoning_content", "reasoning")):
        if key in fields:
            value = fields[key]
            if not isinstance(value, str) or not _is_utf8(value):
                return None
            setattr(chat, name, value)
    return chat


class _ContentParts(msgspec.Struct):
    content: list[msgspec.Raw]


def _parts(content: JSON, text: str) -> list[message_pb2.ContentPart] | None:
    if isinstance(content, str):
        return [message_pb2.ContentPart(text=content)] if _is_utf8(content) else None
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        return None
    try:
        raw = msgspec.json.decode(text, type=_ContentParts).content
    except msgspec.DecodeError:
        return None
    return [
        _part(part, bytes(slice_).decode(), alone=len(content) == 1) for part, slice_ in zip(content, raw, strict=True)
    ]


def _part(fields: Mapping[str, JSON], text: str, *, alone: bool) -> message_pb2.ContentPart:
    """A part in the form whose text it has; a single text part would come back as a plain string."""
    said = fields.get("text")
    if not alone and isinstance(said, str) and text == _write({"type": "text", "text": said}):
        return message_pb2.ContentPart(text=said)
    blob = fields_to_blob(fields)
    if blob is not None and text == _write(blob_to_fields(blob)):
        return message_pb2.ContentPart(blob=blob)
    return message_pb2.ContentPart(json=text)


def _calls(calls: JSON) -> list[message_pb2.ToolCall] | None:
    if not isinstance(calls, list):
        return None
    typed: list[message_pb2.ToolCall] = []
    for call in calls:
        if not isinstance(call, Mapping) or call.keys() != _CALL_KEYS or call["type"] != "function":
            return None
        function = call["function"]
        if not isinstance(function, Mapping) or function.keys() != {"name", "arguments"}:
            return None
        texts = (call["id"], function["name"], function["arguments"])
        if not all(isinstance(text, str) and _is_utf8(text) for text in texts):
            return None
        typed.append(message_pb2.ToolCall(id=str(texts[0]), name=str(texts[1]), arguments_json=str(texts[2])))
    return typed


def _is_utf8(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def utf8(text: str) -> str:
    """The text with halves of surrogate pairs, which UTF-8 does not have, replaced by question marks."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")

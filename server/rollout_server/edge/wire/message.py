"""Conversion of messages, which have two forms (D13).

The JSON form is verbatim text in both directions. The typed form is converted to a JSON object as OpenAI-style endpoints define
it. In the other direction, a message that the typed form cannot represent (unknown keys, null instead of absent) stays JSON.

A blob becomes a content part with a data: URI, which carries the media type and the bytes. Other fields of a blob (`sha256`, and
the `media_type` of a link) become additional keys of the part.
"""

from __future__ import annotations

import base64
import binascii
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
from rollout_server.runtime.ports import Tool

MAX_JSON_BYTES = 8 * 1024 * 1024
MAX_VIOLATIONS = 20
_TYPED_KEYS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content"})
_CALL_KEYS = frozenset({"id", "type", "function"})


def messages_from_proto(
    messages: Sequence[message_pb2.Message], where: str
) -> tuple[tuple[Message, ...], bool, list[Violation]]:
    """Return the messages, whether they are in the typed form, and at most `MAX_VIOLATIONS` violations.

    `where` is the field's path, such as "spec.messages".
    """
    wrong: list[Violation] = []
    parsed: list[Message] = []
    forms = {message.WhichOneof("form") for message in messages}
    if len(forms - {None}) > 1:
        wrong.append(Violation(where, "are in two forms; send all as `json` or all as `chat`"))
    too_many = first_too_many([message.json for message in messages])
    if too_many is not None:
        text = f"exceeds the limit: the messages up to this one have more than {MAX_VALUES} JSON values in total"
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
    """Return the core value of one message. Raises `MalformedMessage` for one without a form, too large or malformed."""
    form = message.WhichOneof("form")
    if form is None:
        raise MalformedMessage("needs `json` or `chat`")
    text = message.json if form == "json" else _chat_to_json(message.chat)
    size = utf8_length(text)
    if size > MAX_JSON_BYTES:
        raise MalformedMessage(f"has {size} bytes, at most {MAX_JSON_BYTES} are allowed")
    return Message.parse(text)


def message_to_proto(message: Message, *, typed: bool) -> message_pb2.Message:
    """Return the proto of one message, in the form that the rollout was started with if it can represent the message."""
    if typed:
        chat = _json_to_chat(message)
        if chat is not None:
            return message_pb2.Message(chat=chat)
    return message_pb2.Message(json=message.text)


def messages_to_proto(messages: Iterable[Message], *, typed: bool) -> list[message_pb2.Message]:
    """Return the protos of messages, each as `message_to_proto` converts it."""
    return [message_to_proto(message, typed=typed) for message in messages]


def tool_to_proto(tool: Tool) -> message_pb2.Tool:
    """Return the proto of a tool."""
    return message_pb2.Tool(
        name=tool.name, description=tool.description, parameters_json_schema=tool.parameters_json_schema
    )


def _chat_to_json(chat: message_pb2.ChatMessage) -> str:
    """Return the JSON form. The text is assembled by hand to insert JSON parts verbatim: parsing them would lose large integers."""
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
    """Return the typed form; None if it cannot represent the whole message."""
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
        # The exact JSON text of each part. Serializing the parsed parts again would change large numbers.
        raw = msgspec.json.decode(text, type=_ContentParts).content
    except msgspec.DecodeError:
        return None
    return [
        _part(part, bytes(slice_).decode(), alone=len(content) == 1) for part, slice_ in zip(content, raw, strict=True)
    ]


def _part(fields: Mapping[str, JSON], text: str, *, alone: bool) -> message_pb2.ContentPart:
    """Return a part that `_part_to_json` converts back to exactly the same JSON text.

    A text part that is alone stays JSON: as `text` it would become a plain string instead of a list.
    """
    content = fields.get("text")
    if not alone and isinstance(content, str) and text == _write({"type": "text", "text": content}):
        return message_pb2.ContentPart(text=content)
    blob = fields_to_blob(fields)
    if blob is not None and text == _write(blob_to_fields(blob)):
        return message_pb2.ContentPart(blob=blob)
    return message_pb2.ContentPart(json=text)


def part_to_proto(part: Mapping[str, JSON]) -> message_pb2.ContentPart:
    """Return a part of a tool's result that is not a text: a blob if that stands for the same fields, and JSON otherwise."""
    blob = fields_to_blob(part)
    if blob is not None and blob_to_fields(blob) == part:
        return message_pb2.ContentPart(blob=blob)
    text = _write(part)
    return message_pb2.ContentPart(json=text if _is_utf8(text) else json.dumps(part))


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


def blob_to_fields(blob: message_pb2.Blob) -> Mapping[str, JSON]:
    """Return the content part of a blob. Raises `MalformedMessage` for a blob without a source."""
    source = blob.WhichOneof("source")
    if source is None:
        raise MalformedMessage("a blob needs `inline` or `uri`")
    kind, _, subtype = blob.media_type.partition("/")
    encoded = base64.b64encode(blob.inline).decode("ascii")
    extra: dict[str, JSON] = {"sha256": blob.sha256.hex()} if blob.sha256 else {}
    if kind == "audio" and source == "inline":
        return {"type": "input_audio", "input_audio": {"data": encoded, "format": subtype}, **extra}
    if source == "uri":
        extra = {"media_type": blob.media_type, **extra}
    uri = blob.uri if source == "uri" else f"data:{blob.media_type};base64,{encoded}"
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": uri}, **extra}
    return {"type": "file", "file": {"file_data": uri}, **extra}


def fields_to_blob(fields: Mapping[str, JSON]) -> message_pb2.Blob | None:
    """Return the blob of a part that `blob_to_fields` could have written; None for any other part."""
    try:
        digest = bytes.fromhex(_text_of(fields, "sha256")) if "sha256" in fields else b""
        match fields.get("type"):
            case "input_audio":
                media_type, data = f"audio/{_inner(fields, 'format')}", _inner(fields, "data")
                return message_pb2.Blob(media_type=media_type, inline=_decoded(data), sha256=digest)
            case "image_url":
                return _blob_from_uri(_inner(fields, "url"), fields, digest)
            case "file":
                return _blob_from_uri(_inner(fields, "file_data"), fields, digest)
            case _:
                return None
    except (ValueError, KeyError, TypeError):
        return None


def _blob_from_uri(uri: str, fields: Mapping[str, JSON], digest: bytes) -> message_pb2.Blob:
    if "media_type" in fields:
        return message_pb2.Blob(media_type=_text_of(fields, "media_type"), uri=uri, sha256=digest)
    head, _, encoded = uri.removeprefix("data:").partition(";base64,")
    return message_pb2.Blob(media_type=head, inline=_decoded(encoded), sha256=digest)


def _decoded(data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None


def _inner(fields: Mapping[str, JSON], key: str) -> str:
    inner = fields[str(fields["type"])]
    if not isinstance(inner, Mapping):
        raise TypeError(key)
    return _text_of(inner, key)


def _text_of(fields: Mapping[str, JSON], key: str) -> str:
    value = fields[key]
    if not isinstance(value, str):
        raise TypeError(key)
    return value


def utf8(text: str) -> str:
    """Return the text with lone surrogates replaced by question marks: protobuf strings are UTF-8, which cannot encode them."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")

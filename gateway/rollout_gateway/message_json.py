"""Conversion of proto messages and tools to JSON. JSON texts in them are passed on verbatim."""

import base64
from typing import Any

import msgspec
from osmosis.rollout.v1.message_pb2 import Blob, ChatMessage, ContentPart, Message, Tool, ToolCall


def message_json(message: Message) -> msgspec.Raw:
    """Return the JSON text of a message, ready to be spliced into a response; null for an empty message."""
    if message.HasField("chat"):
        return msgspec.Raw(msgspec.json.encode(_chat(message.chat)))
    return msgspec.Raw(message.json.encode() or b"null")


def spliced(text: str) -> msgspec.Raw:
    """Return the JSON text of a proto field, ready to be spliced into a response; null if it is empty or malformed."""
    try:
        return msgspec.json.decode(text or "null", type=msgspec.Raw)
    except msgspec.DecodeError:
        # A malformed extra field must not cost the client the whole rollout.
        return msgspec.Raw(b"null")


def tool_json(tool: Tool) -> dict[str, Any]:
    """Return a tool in OpenAI's format."""
    parameters = spliced(tool.parameters_json_schema or '{"type":"object","properties":{}}')
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function | ({"strict": True} if tool.strict else {})}


def _chat(chat: ChatMessage) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": chat.role, "content": _content(chat)}
    if chat.HasField("reasoning"):
        fields["reasoning_content"] = chat.reasoning
    if chat.tool_calls:
        fields["tool_calls"] = [_tool_call(call) for call in chat.tool_calls]
    if chat.HasField("tool_call_id"):
        fields["tool_call_id"] = chat.tool_call_id
    if chat.HasField("name"):
        fields["name"] = chat.name
    return fields


def _content(chat: ChatMessage) -> Any:
    if not chat.parts:
        return None
    if len(chat.parts) == 1 and chat.parts[0].HasField("text"):
        return chat.parts[0].text
    return [_part(part) for part in chat.parts]


def _part(part: ContentPart) -> Any:
    if part.HasField("json"):
        return msgspec.Raw(part.json.encode())
    if part.HasField("blob"):
        return _blob(part.blob)
    return {"type": "text", "text": part.text}


def _blob(blob: Blob) -> dict[str, Any]:
    kind, _, subtype = blob.media_type.partition("/")
    encoded = base64.b64encode(blob.inline).decode()
    if kind == "audio" and blob.HasField("inline"):
        return {"type": "input_audio", "input_audio": {"data": encoded, "format": subtype}}
    url = blob.uri if blob.HasField("uri") else f"data:{blob.media_type};base64,{encoded}"
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": url}}
    return {"type": "file", "file": {"file_data": url}}


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}

"""Conversion of a conversation's protobuf messages to dictionaries in the shape of OpenAI's chat completions API."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from osmosis.rollout.v1.message_pb2 import Blob, ChatMessage, ContentPart, Message
from osmosis.rollout.v1.outcome_pb2 import Outcome
from osmosis.rollout.v1.rollout_service_pb2 import RenderPromptResponse
from osmosis.rollout.v1.spec_pb2 import RolloutSpec

JsonObject: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """Result of `render_prompt`: the first prompt of a rollout, as the server renders it.

    Args:
        ids: token ids.
        tools: as the chat template gets them, {"type": "function", "function": {"name", "description", "parameters"}}. With an
            empty list the server renders without the argument `tools`.
        messages: in the shape of OpenAI's chat completions API.
    """

    ids: list[int]
    tools: list[JsonObject]
    messages: list[JsonObject]

    @classmethod
    def from_response(cls, response: RenderPromptResponse) -> RenderedPrompt:
        """Convert the response of RenderPrompt."""
        tools = [_object(text) for text in response.tools_json]
        return cls(list(response.token_ids), tools, messages(response.messages))


def messages(source: Outcome | RolloutSpec | Iterable[Message]) -> list[JsonObject]:
    """Return messages as dictionaries in the shape of OpenAI's chat completions API.

    Messages in JSON form are parsed and keep all their keys. Typed messages are converted.

    Args:
        source: an outcome or a spec, for its `messages`, or protobuf messages. An outcome contains messages in the views
            "messages", "samples" and "full".

    Raises:
        ValueError: a message in JSON form is not a JSON object.
    """
    listed = source.messages if isinstance(source, Outcome | RolloutSpec) else source
    return [_message(message) for message in listed]


def _message(message: Message) -> JsonObject:
    return _object(message.json) if message.WhichOneof("form") == "json" else _chat(message.chat)


def _object(text: str) -> JsonObject:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("a message or a tool is not a JSON object")
    return value


def _chat(chat: ChatMessage) -> JsonObject:
    fields: JsonObject = {"role": chat.role}
    if len(chat.parts) == 1 and chat.parts[0].HasField("text"):
        fields["content"] = chat.parts[0].text
    elif chat.parts:
        fields["content"] = [_part(part) for part in chat.parts]
    if chat.HasField("name"):
        fields["name"] = chat.name
    if chat.HasField("reasoning"):
        fields["reasoning_content"] = chat.reasoning
    if chat.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
            for call in chat.tool_calls
        ]
    if chat.HasField("tool_call_id"):
        fields["tool_call_id"] = chat.tool_call_id
    return fields


def _part(part: ContentPart) -> JsonObject:
    if part.HasField("json"):
        return _object(part.json)
    if part.HasField("blob"):
        return _blob(part.blob)
    return {"type": "text", "text": part.text}


def _blob(blob: Blob) -> JsonObject:
    kind, _, subtype = blob.media_type.partition("/")
    encoded = base64.b64encode(blob.inline).decode()
    beside: JsonObject = {"sha256": blob.sha256.hex()} if blob.sha256 else {}
    if kind == "audio" and blob.HasField("inline"):
        return {"type": "input_audio", "input_audio": {"data": encoded, "format": subtype}, **beside}
    if blob.HasField("uri"):
        beside = {"media_type": blob.media_type, **beside}
    uri = blob.uri if blob.HasField("uri") else f"data:{blob.media_type};base64,{encoded}"
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": uri}, **beside}
    return {"type": "file", "file": {"file_data": uri}, **beside}

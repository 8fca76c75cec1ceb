"""What rollouts bring back, as plain Python values.

The messages of the contract are typed and returned as they are; here is what they do not offer by themselves.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from osmosis.rollout.v1.message_pb2 import Blob, ChatMessage, ContentPart, Message
from osmosis.rollout.v1.outcome_pb2 import Outcome
from osmosis.rollout.v1.spec_pb2 import RolloutSpec
from osmosis.rollout.v1.token_pb2 import Sample

JsonObject: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One training sample: a prompt that does not train, and the tokens after it.

    Args:
        segment_id: the segment of the ledger that it is.
        prompt_ids: token ids, all masked.
        response_ids: token ids.
        response_mask: 1 for each response id that the model wrote and that trains, 0 for the others.
        logprobs: one natural logarithm for each response id, 0.0 where masked; None: at least one answer came without them.
    """

    segment_id: str
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    logprobs: list[float] | None


def samples(outcome: Outcome) -> list[TrainingSample]:
    """The training samples of an outcome that was read in view "samples" or "full", nearly always one.

    Raises ValueError where ids, mask and logprobs differ in length: such a sample would train on the wrong tokens.
    """
    return [_sample(sample) for sample in outcome.samples]


def messages(source: Outcome | RolloutSpec | Iterable[Message]) -> list[JsonObject]:
    """Messages as dictionaries, in the shape that OpenAI-style endpoints know. Raises ValueError for one that is no JSON object."""
    listed = source.messages if isinstance(source, Outcome | RolloutSpec) else source
    return [_message(message) for message in listed]


def _sample(sample: Sample) -> TrainingSample:
    logprobs = list(sample.logprobs.values) if sample.HasField("logprobs") else None
    made = TrainingSample(
        sample.segment_id, list(sample.prompt_ids), list(sample.response_ids), list(sample.response_mask), logprobs
    )
    lengths = {
        len(made.response_ids),
        len(made.response_mask),
        len(made.response_ids if logprobs is None else logprobs),
    }
    if len(lengths) > 1:
        raise ValueError(f"segment {made.segment_id!r}: ids, mask and logprobs are not of the same length")
    return made


def _message(message: Message) -> JsonObject:
    return _object(message.json) if message.WhichOneof("form") == "json" else _chat(message.chat)


def _object(text: str) -> JsonObject:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("a message is not a JSON object")
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

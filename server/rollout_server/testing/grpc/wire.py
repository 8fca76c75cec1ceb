"""Conversion between the protos and the strict trainer's values: messages, tools, completions and ledgers.

message.proto and completion_service.proto define the rules.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import message_pb2, token_pb2

from rollout_server.testing.checks.renderer import Message
from rollout_server.testing.checks.turn import ScriptedCompletion
from rollout_server.testing.grpc.ledger import HeldSegment, LedgerRun, Mark, Reason
from rollout_server.testing.script import ScriptedReply

_REASONS: Final = {
    None: token_pb2.MASK_REASON_UNSPECIFIED,
    Reason.PROMPT: token_pb2.MASK_REASON_PROMPT,
    Reason.ENVIRONMENT: token_pb2.MASK_REASON_ENVIRONMENT,
    Reason.CLOSING: token_pb2.MASK_REASON_CLOSING,
    Reason.AUTHOR: token_pb2.MASK_REASON_AUTHOR,
}
_CALL_KEYS = {"id", "type", "function"}
_FUNCTION_KEYS = {"name", "arguments"}


def message_from_proto(message: message_pb2.Message) -> Message:
    """Return a message as the chat template gets it. Raises ValueError for one that violates message.proto."""
    match message.WhichOneof("form"):
        case "json":
            return _json_object(message.json)
        case "chat":
            return _chat_from_proto(message.chat)
    raise ValueError("neither json nor chat is set")


def tool_from_proto(tool: message_pb2.Tool) -> dict[str, Any]:
    """Return a tool in the OpenAI form. Raises ValueError if its schema is not a JSON object."""
    function: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": _json_object(tool.parameters_json_schema),
    }
    return {"type": "function", "function": function | ({"strict": True} if tool.strict else {})}


@dataclass(frozen=True, slots=True)
class ResponseDetails:
    """The contents of a completion response. `after` is the checkpoint after it; `prompt` the one before it, in token mode only."""

    completion: ScriptedCompletion
    reply: ScriptedReply
    policy_version: str
    after: Mark
    prompt: Mark | None = None


def response(details: ResponseDetails, *, typed: bool, with_logprobs: bool) -> pb.CompleteResponse:
    """Return the response of a turn, without the fields that the reply omits.

    `ScriptedReply.override` is ignored: it replaces fields of a JSON body.
    """
    completion, omit = details.completion, details.reply.omit
    filled = pb.CompleteResponse(
        message=message_to_proto(completion.message, typed=typed),
        finish_reason=completion.finish_reason,
        policy_version=details.policy_version,
        policy_step=details.reply.policy_step,
        raw_text=completion.raw_text,
        after=checkpoint(details.after),
        usage=pb.Usage(prompt_tokens=len(completion.prompt_ids), completion_tokens=len(completion.token_ids)),
    )
    if "token_ids" not in omit:
        filled.token_ids.extend(completion.token_ids)
    if with_logprobs and "logprobs" not in omit:
        filled.logprobs.values.extend(completion.logprobs)
        filled.logprobs.SetInParent()
    if details.prompt:
        filled.prompt_checkpoint.CopyFrom(checkpoint(details.prompt))
    elif "prompt_token_ids" not in omit:
        filled.prompt_ids.values.extend(completion.prompt_ids)
    return filled


def message_to_proto(message: Message, *, typed: bool) -> message_pb2.Message:
    """Return an assistant message in the rollout's form, or as JSON if the typed form cannot represent it."""
    if typed and _fits_chat(message):
        return message_pb2.Message(chat=_chat_to_proto(message))
    return message_pb2.Message(json=json.dumps(message, ensure_ascii=False))


def checkpoint(mark: Mark) -> token_pb2.Checkpoint:
    """Return the proto of a mark."""
    return token_pb2.Checkpoint(messages=mark.messages, tokens=mark.tokens, digest=mark.digest)


def tools_digest(tools: Iterable[message_pb2.Tool]) -> bytes:
    """Return the digest of a list of tools as message.proto (ToolSet) defines it."""
    digest = hashlib.sha256()
    for tool in tools:
        for text in (tool.name, tool.description, tool.parameters_json_schema):
            encoded = text.encode()
            digest.update(struct.pack("<I", len(encoded)) + encoded)
        digest.update(b"\x01" if tool.strict else b"\x00")
    return digest.digest()


def ledger(segment: HeldSegment, offset: int) -> pb.ReadLedgerResponse:
    """Return a segment's spans from the token at `offset` on, and all its checkpoints."""
    return pb.ReadLedgerResponse(
        spans=[_span(run) for run in segment.runs(offset)], checkpoints=[checkpoint(mark) for mark in segment.marks]
    )


def _span(run: LedgerRun) -> token_pb2.Span:
    span = token_pb2.Span(
        author=token_pb2.AUTHOR_MODEL if run.by_model else token_pb2.AUTHOR_OTHER,
        mask_reason=_REASONS[run.reason],
        turn=run.turn,
        token_ids=run.token_ids,
        policy_version=run.policy_version,
    )
    if run.logprobs:
        span.logprobs.values.extend(run.logprobs)
    return span


def _chat_from_proto(chat: message_pb2.ChatMessage) -> Message:
    if not chat.role.strip():
        raise ValueError("the role is blank")
    message: dict[str, Any] = {"role": chat.role}
    parts = [_part_from_proto(part) for part in chat.parts]
    if len(parts) == 1 and chat.parts[0].HasField("text"):
        message["content"] = chat.parts[0].text
    elif parts:
        message["content"] = parts
    if chat.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
            for call in chat.tool_calls
        ]
    if chat.HasField("tool_call_id"):
        message["tool_call_id"] = chat.tool_call_id
    if chat.HasField("name"):
        message["name"] = chat.name
    if chat.HasField("reasoning"):
        message["reasoning_content"] = chat.reasoning
    return message


def _part_from_proto(part: message_pb2.ContentPart) -> Mapping[str, Any]:
    match part.WhichOneof("part"):
        case "text":
            return {"type": "text", "text": part.text}
        case "blob":
            return {"type": "blob", "media_type": part.blob.media_type}
        case "json":
            return _json_object(part.json)
    raise ValueError("a content part is empty")


def _fits_chat(message: Message) -> bool:
    calls: Sequence[Any] = message.get("tool_calls") or ()
    plain_calls = all(
        set(call) == _CALL_KEYS
        and set(call["function"]) == _FUNCTION_KEYS
        and isinstance(call["function"]["arguments"], str)
        for call in calls
    )
    known = {"role", "content", "tool_calls", "reasoning_content", "name"}
    return plain_calls and set(message) <= known and isinstance(message.get("content"), str | None)


def _chat_to_proto(message: Message) -> message_pb2.ChatMessage:
    chat = message_pb2.ChatMessage(role="assistant")
    if isinstance(message.get("content"), str):
        chat.parts.add(text=message["content"])
    for call in message.get("tool_calls") or ():
        function = call["function"]
        chat.tool_calls.add(id=call["id"], name=function["name"], arguments_json=function["arguments"])
    if "reasoning_content" in message:
        chat.reasoning = message["reasoning_content"]
    if "name" in message:
        chat.name = message["name"]
    return chat


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value

"""Completions over gRPC: what a trainer is asked, and what it answers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TypeAlias, TypeVar

from google.protobuf.message import DecodeError
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import message_pb2, spec_pb2, token_pb2

from rollout_server.core.checkpoint import Checkpoint
from rollout_server.core.ledger import (
    MAX_TOKEN_ID,
    Author,
    Logprobs,
    MaskReason,
    Origin,
    Tokens,
    pack_logprobs,
    pack_tokens,
)
from rollout_server.core.message import MalformedMessage, Message, first_too_many, tool_calls, utf8_length
from rollout_server.core.record import Asked
from rollout_server.core.segment import Plane
from rollout_server.core.spec import Sampling, Spec
from rollout_server.edge.offload import offload_response
from rollout_server.edge.rpc.field_count import TooManyFields, check_fields
from rollout_server.edge.trainer.response_limits import (
    ANSWER_VALUES,
    MESSAGE_VALUES,
    check_calls,
    check_message,
    check_size,
)
from rollout_server.edge.wire import enums
from rollout_server.edge.wire.message import message_from_proto, messages_to_proto, tool_to_proto, utf8
from rollout_server.edge.wire.outcome import origin_to_proto
from rollout_server.edge.wire.spec import sampling_to_proto
from rollout_server.edge.wire.token_planes import extra_from_proto, planes_from_proto
from rollout_server.runtime.ports import Tool

_P = TypeVar("_P", pb.CompleteResponse, pb.ReadLedgerResponse)
Request: TypeAlias = pb.CompleteRequest
Response: TypeAlias = pb.CompleteResponse

_MOST_CHARACTERS = 256
"""Of a trainer's words that are kept for each span or shown as they are."""


@dataclass(frozen=True, slots=True)
class NewSpan:
    """Tokens that a trainer does not hold yet."""

    author: Author
    reason: MaskReason | None
    turn: int
    ids: Tokens


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer, read and checked.

    Args:
        token_ids, logprobs: None where the trainer sent none, or not one logprob for each token.
        reported: the prompt as the trainer saw it; None in token mode, and where it does not say.
        prompt, after: the trainer's checkpoints of the prompt, and of prompt and answer.
        tool_calls: how many calls the answer holds.
    """

    message: Message
    finish_reason: str
    token_ids: Tokens | None
    logprobs: Logprobs | None
    reported: Tokens | None
    prompt: Checkpoint | None
    after: Checkpoint | None
    usage: tuple[int, int] | None
    policy_version: str
    tool_calls: int
    planes: tuple[Plane, ...] = ()
    extra_json: str = ""

    @property
    def shows_prompt(self) -> bool:
        """It says what the model saw, in one way or the other."""
        return self.prompt is not None or self.reported is not None


class MalformedCompletion(ValueError):
    """The answer breaks the contract. The text names the field."""


@dataclass(frozen=True, slots=True)
class PromptUpdate:
    """What a trainer is told in one turn.

    Args:
        base: what it holds already; None: nothing, and the rest is the whole history.
        messages, spans: what comes after the base.
        prompt: base and spans together, in token mode; else None.
        origin: where the segment comes from, on its first turn; else None.
    """

    base: Checkpoint | None
    messages: Sequence[Message]
    spans: Sequence[NewSpan] = ()
    prompt: Checkpoint | None = None
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class RequestBuilder:
    """What stays the same in all turns of a rollout."""

    uid: str
    rollout_id: str
    typed: bool
    tools: Sequence[Tool]

    def request(self, asked: Asked, sampling: Sampling, news: PromptUpdate, *, list_tools: bool) -> Request:
        """The request of one turn, with the list of tools or their digest alone."""
        base = news.base
        request = pb.CompleteRequest(
            uid=self.uid,
            rollout_id=utf8(self.rollout_id),
            segment_id=asked.segment_id,
            turn=asked.turn,
            turn_key=asked.turn_key,
            sampling=sampling_to_proto(sampling),
            base=_checkpoint(base) if base is not None else None,
            new_messages=messages_to_proto(news.messages, typed=self.typed),
            tools=self._tool_set(listed=list_tools),
            origin=origin_to_proto(news.origin) if news.origin is not None else None,
        )
        if news.prompt is not None:
            request.new_tokens.CopyFrom(_new_tokens(news.spans, news.prompt))
        return request

    def _tool_set(self, *, listed: bool) -> message_pb2.ToolSet:
        tools = [tool_to_proto(tool) for tool in self.tools]
        return message_pb2.ToolSet(digest=_digest(tools), tools=tools if listed else ())


def checkpoint_from_proto(proto: token_pb2.Checkpoint) -> Checkpoint:
    """A checkpoint."""
    return Checkpoint(proto.messages, proto.tokens, proto.digest)


def in_token_mode(spec: Spec) -> bool:
    """Whether a gRPC trainer is sent ids: if the spec says so, or names a tokenizer and says nothing."""
    if spec.token_mode == spec_pb2.TOKEN_MODE_UNSPECIFIED:
        return spec.tokenizer is not None
    return spec.token_mode == spec_pb2.TOKEN_MODE_TOKENS


def ledger_request(uid: str, segment_id: str) -> pb.ReadLedgerRequest:
    """Asks for a segment as the trainer holds it, from its first token."""
    return pb.ReadLedgerRequest(uid=uid, segment_id=segment_id)


def _checkpoint(checkpoint: Checkpoint) -> token_pb2.Checkpoint:
    return token_pb2.Checkpoint(messages=checkpoint.messages, tokens=checkpoint.tokens, digest=checkpoint.digest)


def _new_tokens(spans: Sequence[NewSpan], after: Checkpoint) -> pb.NewTokens:
    return pb.NewTokens(
        spans=[
            token_pb2.Span(
                author=enums.AUTHORS[span.author],
                mask_reason=enums.MASK_REASONS[span.reason],
                turn=span.turn,
                token_ids=span.ids,
            )
            for span in spans
            if span.ids
        ],
        after=_checkpoint(after),
    )


async def parse_response(data: bytes) -> Response:
    """Parses an encoded answer, a large one in a thread. Raises `MalformedCompletion`."""
    return await offload_response(lambda: _parse(pb.CompleteResponse, data), len(data))


async def read_ledger(data: bytes) -> tuple[Tokens, Sequence[Author]] | None:
    """An encoded ledger as `held_tokens` reads it. Raises `MalformedCompletion`."""
    return await offload_response(lambda: held_tokens(_parse(pb.ReadLedgerResponse, data)), len(data))


def _parse(kind: type[_P], data: bytes) -> _P:
    try:
        check_fields(data, kind.DESCRIPTOR, MESSAGE_VALUES)
        return kind.FromString(data)
    except DecodeError:
        raise MalformedCompletion("it is no protobuf message") from None
    except TooManyFields:
        raise MalformedCompletion(
            f"it holds more than {MESSAGE_VALUES} fields, which is the most that is read"
        ) from None


def completion_from_proto(proto: pb.CompleteResponse, most_calls: int) -> Completion:
    """Reads an answer. Raises `MalformedCompletion`."""
    try:
        _check_values(proto, most_calls)
        message = message_from_proto(proto.message)
        check_size(utf8_length(message.text))
        calls = len(tool_calls(message.fields()))
    except MalformedMessage as error:
        raise MalformedCompletion(f"message: {error}") from None
    if message.role != "assistant":
        # Not repeated: what a trainer writes there may be the key that it was sent.
        raise MalformedCompletion('message: its role is another than "assistant"')
    for field, text in (("finish_reason", proto.finish_reason), ("policy_version", proto.policy_version)):
        if len(text) > _MOST_CHARACTERS:
            raise MalformedCompletion(f"{field}: has {len(text)} characters, at most {_MOST_CHARACTERS} are allowed")
    ids = _ids(proto.token_ids, "token_ids") if proto.token_ids or _says_empty(proto) else None
    try:
        planes = planes_from_proto(proto.planes, len(ids)) if ids is not None else ()
        extra = extra_from_proto(proto.extra_json)
    except ValueError as error:
        raise MalformedCompletion(str(error)) from None
    seen = proto.WhichOneof("prompt")
    return Completion(
        message=message,
        finish_reason=proto.finish_reason,
        token_ids=ids,
        logprobs=_logprobs(proto, len(ids)) if ids is not None else None,
        reported=_ids(proto.prompt_ids.values, "prompt_ids") if seen == "prompt_ids" else None,
        prompt=checkpoint_from_proto(proto.prompt_checkpoint) if seen == "prompt_checkpoint" else None,
        after=checkpoint_from_proto(proto.after) if proto.HasField("after") else None,
        usage=_usage(proto),
        policy_version=proto.policy_version,
        tool_calls=calls,
        planes=planes,
        extra_json=extra,
    )


async def read_completion(proto: pb.CompleteResponse, most_calls: int) -> Completion:
    """The same; a large answer is read in a thread, so that other rollouts do not wait for it."""
    return await offload_response(lambda: completion_from_proto(proto, most_calls), proto.ByteSize())


def _check_values(proto: pb.CompleteResponse, most_calls: int) -> None:
    """Raises `MalformedMessage` for more calls or values than are read of an answer, before any of them is parsed."""
    if proto.message.WhichOneof("form") == "json":
        check_message(proto.message.json.encode("utf-8", "surrogatepass"), most_calls)
        return
    check_calls(len(proto.message.chat.tool_calls), most_calls)
    parts = proto.message.chat.parts
    if len(parts) > MESSAGE_VALUES or first_too_many([part.json for part in parts], MESSAGE_VALUES) is not None:
        raise MalformedMessage(f"its parts hold more than {MESSAGE_VALUES} values, which is the most that is read")


def held_tokens(ledger: pb.ReadLedgerResponse) -> tuple[Tokens, Sequence[Author]] | None:
    """What a trainer holds, and who it says wrote each token. None for more tokens than an answer may have."""
    if sum(len(span.token_ids) for span in ledger.spans) > ANSWER_VALUES:
        return None
    ids, authors = pack_tokens(), list[Author]()
    for span in ledger.spans:
        ids.extend(span.token_ids)
        author = Author.MODEL if span.author == token_pb2.AUTHOR_MODEL else Author.OTHER
        authors += [author] * len(span.token_ids)
    return ids, authors


def _ids(values: Sequence[int], field: str) -> Tokens:
    if len(values) > ANSWER_VALUES:
        raise MalformedCompletion(f"{field}: has {len(values)} entries, at most {ANSWER_VALUES} are read")
    ids = pack_tokens(values)
    if ids and max(ids) > MAX_TOKEN_ID:
        raise MalformedCompletion(f"{field}: {max(ids)} is no token id; they are below 2^31")
    return ids


def _says_empty(proto: pb.CompleteResponse) -> bool:
    """Whether an answer without ids is one of no tokens: then nothing came between its two checkpoints."""
    seen = proto.WhichOneof("prompt")
    if not proto.HasField("after") or seen is None:
        return False
    prompt = len(proto.prompt_ids.values) if seen == "prompt_ids" else proto.prompt_checkpoint.tokens
    return proto.after.tokens == prompt


def _usage(proto: pb.CompleteResponse) -> tuple[int, int] | None:
    """The trainer's counts; None where there are none, or none that can be."""
    counts = (proto.usage.prompt_tokens, proto.usage.completion_tokens)
    return counts if proto.HasField("usage") and max(counts) <= MAX_TOKEN_ID else None


def _logprobs(proto: pb.CompleteResponse, length: int) -> Logprobs | None:
    values = proto.logprobs.values
    if not proto.HasField("logprobs") or len(values) != length:
        return None
    packed = pack_logprobs(values)
    return packed if all(map(isfinite, packed)) else None


def _digest(tools: Sequence[message_pb2.Tool]) -> bytes:
    """As message.proto (ToolSet) says."""
    digest = hashlib.sha256()
    for tool in tools:
        for text in (tool.name, tool.description, tool.parameters_json_schema):
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(4, "little") + encoded)
        digest.update(bytes([tool.strict]))
    return digest.digest()

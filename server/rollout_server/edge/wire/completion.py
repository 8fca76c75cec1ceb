"""Conversion and validation of completions over gRPC (completion_service.proto)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    PolicyRun,
    Tokens,
    pack_logprobs,
    pack_tokens,
)
from rollout_server.core.message import MalformedMessage, Message, first_too_many, tool_calls, utf8_length
from rollout_server.core.record import Asked
from rollout_server.core.segment import Plane
from rollout_server.core.spec import Spec
from rollout_server.edge.offload import offload_response
from rollout_server.edge.rpc.field_count import TooManyFields, check_fields
from rollout_server.edge.trainer.aborted_parts import CUT, AbortedParts, CompletionPart
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
"""Maximum length of a trainer's `finish_reason` and `policy_version`, which are stored with spans and returned verbatim."""


@dataclass(frozen=True, slots=True)
class NewSpan:
    """A run of tokens that the trainer does not have yet."""

    author: Author
    reason: MaskReason | None
    turn: int
    ids: Tokens


@dataclass(frozen=True, slots=True)
class Completion:
    """One validated completion.

    Args:
        token_ids: the sampled ids; None if the trainer sent none.
        logprobs: one float per token; None if the trainer did not send exactly one finite value per token.
        reported: the prompt's token ids as the trainer reports them; None in token mode, or if it does not report them.
        prompt, after: the trainer's checkpoints of the prompt, and of prompt and completion.
        usage: number of prompt tokens and of generated tokens, if the trainer reports them.
        policy_step: the step of the policy; None if unknown.
        tool_calls: number of tool calls in the message.
        runs: the policies that sampled it, if there are several.
        cut: its last part was aborted at `max_tokens`, so the trainer need not send checkpoints.
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
    policy_step: int | None = None
    runs: tuple[PolicyRun, ...] = ()
    cut: bool = False

    @property
    def part(self) -> CompletionPart:
        """What it holds of one request: the tokens and their policy."""
        ids = pack_tokens() if self.token_ids is None else self.token_ids
        return CompletionPart(ids, self.logprobs, self.planes, self.policy_version, self.policy_step)

    @property
    def shows_prompt(self) -> bool:
        """Whether the trainer reported the prompt, as ids or as a checkpoint."""
        return self.prompt is not None or self.reported is not None


class MalformedCompletion(ValueError):
    """A completion violates the contract. The text names the field."""


@dataclass(frozen=True, slots=True)
class PromptUpdate:
    """The part of the history that one completion request sends.

    Args:
        base: the part that the trainer already knows; None: nothing, and the update holds the whole history.
        messages, spans: the messages and tokens after the base.
        prompt: in token mode the checkpoint of base and spans together; else None.
        origin: in the first turn of a segment its origin; else None.
    """

    base: Checkpoint | None
    messages: Sequence[Message]
    spans: Sequence[NewSpan] = ()
    prompt: Checkpoint | None = None
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class RequestBuilder:
    """Builds the completion requests of a rollout. Its fields are the same in all turns."""

    uid: str
    rollout_id: str
    typed: bool
    tool_set: message_pb2.ToolSet

    def request(self, asked: Asked, parts: AbortedParts, news: PromptUpdate, *, list_tools: bool) -> Request:
        """Return the request of one turn, or of the rest of it after the aborted `parts`.

        `list_tools` includes the list of tools; without it only their digest is sent.
        """
        base = news.base
        request = pb.CompleteRequest(
            uid=self.uid,
            rollout_id=utf8(self.rollout_id),
            segment_id=asked.segment_id,
            turn=asked.turn,
            turn_key=parts.turn_key(asked.turn_key),
            sampling=sampling_to_proto(parts.sampling),
            base=_checkpoint(base) if base is not None else None,
            new_messages=messages_to_proto(news.messages, typed=self.typed),
            tools=self.tool_set if list_tools else message_pb2.ToolSet(digest=self.tool_set.digest),
            origin=origin_to_proto(news.origin) if news.origin is not None else None,
            resumed=[_resumed(part, asked.turn) for part in parts.held],
        )
        if news.prompt is not None:
            request.new_tokens.CopyFrom(_new_tokens(news.spans, news.prompt))
        return request


def tool_set(tools: Sequence[Tool]) -> message_pb2.ToolSet:
    """Return the tools of a rollout, and their digest."""
    listed = [tool_to_proto(tool) for tool in tools]
    return message_pb2.ToolSet(digest=_digest(listed), tools=listed)


def checkpoint_from_proto(proto: token_pb2.Checkpoint) -> Checkpoint:
    """Return the core value of a checkpoint."""
    return Checkpoint(proto.messages, proto.tokens, proto.digest)


def in_token_mode(spec: Spec) -> bool:
    """Return whether a gRPC trainer gets token ids. By default it does if the spec names a tokenizer."""
    if spec.token_mode == spec_pb2.TOKEN_MODE_UNSPECIFIED:
        return spec.tokenizer is not None
    return spec.token_mode == spec_pb2.TOKEN_MODE_TOKENS


def ledger_request(uid: str, segment_id: str) -> pb.ReadLedgerRequest:
    """Return a request for the trainer's copy of a segment, from its first token."""
    return pb.ReadLedgerRequest(uid=uid, segment_id=segment_id)


def _checkpoint(checkpoint: Checkpoint) -> token_pb2.Checkpoint:
    return token_pb2.Checkpoint(messages=checkpoint.messages, tokens=checkpoint.tokens, digest=checkpoint.digest)


def _resumed(part: CompletionPart, turn: int) -> token_pb2.Span:
    """Return an aborted part as a span, without its planes: the trainer generates from the ids."""
    known = part.logprobs
    return token_pb2.Span(
        author=token_pb2.AUTHOR_MODEL,
        turn=turn,
        token_ids=part.token_ids,
        logprobs=token_pb2.Logprobs(values=known) if known is not None else None,
        policy_version=part.policy_version,
        policy_step=part.policy_step,
    )


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
    """Parse an encoded completion, a large one in a thread. Raises `MalformedCompletion`."""
    return await offload_response(lambda: _parse(pb.CompleteResponse, data), len(data))


async def read_ledger(data: bytes) -> tuple[Tokens, Sequence[Author]] | None:
    """Parse an encoded ledger and return its `held_tokens`. Raises `MalformedCompletion`."""
    return await offload_response(lambda: held_tokens(_parse(pb.ReadLedgerResponse, data)), len(data))


def _parse(kind: type[_P], data: bytes) -> _P:
    try:
        if len(data) > 2 * MESSAGE_VALUES:  # no field takes less than two bytes
            check_fields(data, kind.DESCRIPTOR, MESSAGE_VALUES)
        return kind.FromString(data)
    except DecodeError:
        raise MalformedCompletion("it is not a valid protobuf message") from None
    except TooManyFields:
        raise MalformedCompletion(f"it has more than {MESSAGE_VALUES} fields, the maximum") from None


def completion_from_proto(proto: pb.CompleteResponse, most_calls: int, *, resumed: bool = False) -> Completion:
    """Validate and convert a completion. Raises `MalformedCompletion`.

    Args:
        proto: the response.
        most_calls: the maximum number of tool calls in it.
        resumed: earlier parts have tokens, so that a response without any has zero.
    """
    try:
        _check_values(proto, most_calls)
        message = message_from_proto(proto.message)
        check_size(utf8_length(message.text))
        calls = len(tool_calls(message.fields()))
    except MalformedMessage as error:
        raise MalformedCompletion(f"message: {error}") from error
    if message.role != "assistant":
        # The error does not quote the role: a trainer may echo the API key that it received there.
        raise MalformedCompletion('message: its role is not "assistant"')
    # proto3 cannot distinguish an empty list from one that was not sent.
    sends_ids = bool(proto.token_ids) or resumed or _is_empty_completion(proto)
    part = part_from_proto(proto, with_planes=sends_ids)
    try:
        extra = extra_from_proto(proto.extra_json)
    except ValueError as error:
        raise MalformedCompletion(str(error)) from None
    seen = proto.WhichOneof("prompt")
    return Completion(
        message=message,
        finish_reason=proto.finish_reason,
        token_ids=part.token_ids if sends_ids else None,
        logprobs=part.logprobs if sends_ids else None,
        reported=_ids(proto.prompt_ids.values, "prompt_ids") if seen == "prompt_ids" else None,
        prompt=checkpoint_from_proto(proto.prompt_checkpoint) if seen == "prompt_checkpoint" else None,
        after=checkpoint_from_proto(proto.after) if proto.HasField("after") else None,
        usage=_usage(proto),
        policy_version=part.policy_version,
        tool_calls=calls,
        planes=part.planes,
        extra_json=extra,
        policy_step=part.policy_step,
    )


def part_from_proto(proto: pb.CompleteResponse, *, with_planes: bool = True) -> CompletionPart:
    """Validate and convert the tokens of a response, which may be an aborted one. Raises `MalformedCompletion`."""
    for field, text in (("finish_reason", proto.finish_reason), ("policy_version", proto.policy_version)):
        if len(text) > _MOST_CHARACTERS:
            raise MalformedCompletion(f"{field}: has {len(text)} characters, at most {_MOST_CHARACTERS} are allowed")
    if proto.policy_step < 0:
        raise MalformedCompletion(f"policy_step: is {proto.policy_step}; steps are 0 or more")
    ids = _ids(proto.token_ids, "token_ids")
    try:
        planes = planes_from_proto(proto.planes, len(ids)) if with_planes else ()
    except ValueError as error:
        raise MalformedCompletion(str(error)) from None
    step = proto.policy_step if proto.HasField("policy_step") else None
    return CompletionPart(ids, _logprobs(proto, len(ids)), planes, proto.policy_version, step)


async def read_completion(proto: pb.CompleteResponse, most_calls: int, *, resumed: bool = False) -> Completion:
    """Call `completion_from_proto`, for a large completion in a thread, because it would block the event loop."""
    return await offload_response(lambda: completion_from_proto(proto, most_calls, resumed=resumed), proto.ByteSize())


async def read_cut(proto: pb.CompleteResponse, most_calls: int, text: str | None) -> Completion:
    """Return what an aborted response says besides its tokens, if they end the completion because it has `max_tokens` tokens.

    `text` is the text of all parts, which is the message's content; None in message mode: the message is the response's.
    """
    whole = pb.CompleteResponse()
    whole.CopyFrom(proto)
    whole.finish_reason = CUT
    for field in ("token_ids", "logprobs", "planes"):
        whole.ClearField(field)
    if text is not None:
        whole.message.json = json.dumps({"role": "assistant", "content": text})
    elif proto.message.WhichOneof("form") is None:
        raise MalformedCompletion("message: is missing, but the aborted completion has max_tokens tokens and ends")
    return replace(await read_completion(whole, most_calls, resumed=True), cut=True)


async def read_part(proto: pb.CompleteResponse) -> CompletionPart:
    """Call `part_from_proto`, for a large part in a thread."""
    return await offload_response(lambda: part_from_proto(proto), proto.ByteSize())


def _check_values(proto: pb.CompleteResponse, most_calls: int) -> None:
    """Raise `MalformedMessage` for too many tool calls or values, before any of them is parsed."""
    if proto.message.WhichOneof("form") == "json":
        check_message(proto.message.json.encode("utf-8", "surrogatepass"), most_calls)
        return
    check_calls(len(proto.message.chat.tool_calls), most_calls)
    parts = proto.message.chat.parts
    if len(parts) > MESSAGE_VALUES or first_too_many([part.json for part in parts], MESSAGE_VALUES) is not None:
        raise MalformedMessage(f"its parts have more than {MESSAGE_VALUES} values, the maximum")


def held_tokens(ledger: pb.ReadLedgerResponse) -> tuple[Tokens, Sequence[Author]] | None:
    """Return the token ids of the trainer's ledger and the author of each. None if there are more than `ANSWER_VALUES` tokens."""
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
        raise MalformedCompletion(f"{field}: has {len(values)} entries, at most {ANSWER_VALUES} are allowed")
    ids = pack_tokens(values)
    if ids and max(ids) > MAX_TOKEN_ID:
        raise MalformedCompletion(f"{field}: {max(ids)} is not a token id; token ids are below 2^31")
    return ids


def _is_empty_completion(proto: pb.CompleteResponse) -> bool:
    """Return whether a completion without ids has zero tokens: then its checkpoints before and after it have equal length."""
    seen = proto.WhichOneof("prompt")
    if not proto.HasField("after") or seen is None:
        return False
    prompt = len(proto.prompt_ids.values) if seen == "prompt_ids" else proto.prompt_checkpoint.tokens
    return proto.after.tokens == prompt


def _usage(proto: pb.CompleteResponse) -> tuple[int, int] | None:
    """Return the trainer's token counts; None if it sent none or impossible ones."""
    counts = (proto.usage.prompt_tokens, proto.usage.completion_tokens)
    return counts if proto.HasField("usage") and max(counts) <= MAX_TOKEN_ID else None


def _logprobs(proto: pb.CompleteResponse, length: int) -> Logprobs | None:
    values = proto.logprobs.values
    if not proto.HasField("logprobs") or len(values) != length:
        return None
    packed = pack_logprobs(values)
    # NaN and infinite values would spoil a training loss: all logprobs of the turn then count as not sent.
    return packed if all(map(isfinite, packed)) else None


def _digest(tools: Sequence[message_pb2.Tool]) -> bytes:
    """Return the digest of the tools as message.proto (ToolSet) defines it."""
    digest = hashlib.sha256()
    for tool in tools:
        for text in (tool.name, tool.description, tool.parameters_json_schema):
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(4, "little") + encoded)
        digest.update(bytes([tool.strict]))
    return digest.digest()

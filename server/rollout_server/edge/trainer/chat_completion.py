"""OpenAI-style chat completions of both HTTP APIs. Only the synchronous HTTP API has `response_mask`.

The message history of a rollout only grows, so its serialized bytes are kept and new messages are appended. The completion's
message is kept as the exact slice of the received JSON text. A reported prompt also grows, so only its new ids are decoded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import Annotated

import msgspec

from rollout_server.core.ledger import MAX_TOKEN_ID, Logprobs, PolicyRun, Tokens, pack_logprobs, pack_tokens
from rollout_server.core.message import JSON, MalformedMessage, Message, parse_object, tool_calls
from rollout_server.core.outcome import Category, Failure, FailureClass
from rollout_server.core.segment import Plane
from rollout_server.edge.offload import offload_response
from rollout_server.edge.trainer.aborted_parts import ABORTED
from rollout_server.edge.trainer.response_limits import check_message, class_of_response_error, decode_response
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.ports import CompletionRequest

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]
_FinishReason = Annotated[str, msgspec.Meta(max_length=256)]
NULL = msgspec.Raw(b"null")


class _ChatChoice(msgspec.Struct):
    message: msgspec.Raw = NULL
    finish_reason: _FinishReason | None = None


class _ChatBody(msgspec.Struct):
    choices: list[_ChatChoice]
    token_ids: list[TokenId] | None = None
    prompt_token_ids: msgspec.Raw = NULL
    logprobs: msgspec.Raw = NULL
    usage: msgspec.Raw = NULL


class _ChatPrompt(msgspec.Struct):
    prompt_token_ids: list[TokenId] | None = None


class _ChatUsage(msgspec.Struct):
    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0


class ChatCompletion(msgspec.Struct, frozen=True):
    """A checked completion of a trainer or an engine.

    Args:
        message: the assistant message, verbatim.
        tool_calls: number of tool calls in it.
        finish_reason: as reported; "" if missing.
        token_ids: generated token ids, int; None if not sent.
        reported: token ids of the prompt, int; None if not sent.
        logprobs: one float per generated token; None unless there is a finite one for each.
        usage: (prompt tokens, completion tokens); None if not sent.
        policy_version: the version of the weights, as reported; "" if unknown.
        planes: further values per token; empty over HTTP.
        extra_json: further data as JSON text; empty over HTTP.
        policy_step: the version of the weights as a step, if it is one; None otherwise.
        runs: the policies that sampled it, if there are several.
        prompt_text: size and digest of the JSON text of `reported`, see `EarlierPrompt`.
    """

    message: Message
    tool_calls: int
    finish_reason: str
    token_ids: Tokens | None
    reported: Tokens | None
    logprobs: Logprobs | None
    usage: tuple[int, int] | None = None
    policy_version: str = ""
    planes: tuple[Plane, ...] = ()
    extra_json: str = ""
    policy_step: int | None = None
    runs: tuple[PolicyRun, ...] = ()
    prompt_text: tuple[int, bytes] = (0, b"")


_decoder = msgspec.json.Decoder(_ChatBody)
_prompt_decoder = msgspec.json.Decoder(_ChatPrompt)
_usage_decoder = msgspec.json.Decoder(_ChatUsage | None)
_logprobs_decoder = msgspec.json.Decoder(list[float])


class RequestWriter:
    """Write the request bodies of one rollout. `rollout_id` is None for an endpoint that does not use rollout ids.

    `parameters` are the JSON members besides rollout id and messages: the sampling parameters and further members of the turn.
    """

    def __init__(self, rollout_id: str | None) -> None:
        self._head = b"{" if rollout_id is None else f'{{"rollout_id":{json.dumps(rollout_id)},'.encode()
        self._history = bytearray()
        self._messages = 0

    def masked(self, messages: Sequence[Message], parameters: str, mask_length: int | None) -> bytes:
        """Return the body for a conversation that extends the previous one.

        The mask is `mask_length` zeros; None or 0 gives `null`.
        """
        mask = b"[" + b"0," * (mask_length - 1) + b"0]" if mask_length else b"null"
        return self.plain(messages, parameters, b',"response_mask":' + mask)

    def plain(self, messages: Sequence[Message], parameters: str, more: bytes = b"") -> bytes:
        """Return the body without a mask. `more` is a further member with a leading comma."""
        members = parameters.encode(), b',"messages":[', self._written(messages), b"]", more
        return b"".join((self._head, *members, b"}"))

    def _written(self, messages: Sequence[Message]) -> bytearray:
        for message in messages[self._messages :]:
            if self._history:
                self._history += b","
            self._history += message.text.encode()
        self._messages = len(messages)
        return self._history


class ReportedPrompts:
    """Read the prompts that a trainer reports for one conversation.

    The JSON text of a prompt nearly always begins with that of the turn before, whose ids are in the ledger. The text is not kept,
    only its digest.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._count = 0
        self._size = 0
        self._digest = b""

    def earlier(self, request: CompletionRequest) -> EarlierPrompt | None:
        """Return the prompt of the last completion; None if the ledger of the next request does not begin with it."""
        last, ledger = request.last, request.ledger
        if last is None or last.token_ids is None or last.turn != self._turn:
            return None
        if ledger.gap or ledger.tokens != self._count + len(last.token_ids):
            return None
        return EarlierPrompt(ledger.prefix()[: self._count], self._size, self._digest)

    def add(self, turn: int, completion: ChatCompletion) -> None:
        """Keep the digest of a prompt that was read."""
        self._turn, self._count = turn, len(completion.reported or ())
        self._size, self._digest = completion.prompt_text


@dataclass(frozen=True, slots=True)
class EarlierPrompt:
    """A prompt that was reported before: its ids, and size and SHA-256 digest of its JSON text without the closing bracket."""

    ids: Tokens
    size: int
    digest: bytes


def parse_chat_completion(
    body: bytes, turn: int, *, ids_needed: bool, most_calls: int, known: EarlierPrompt | None = None
) -> ChatCompletion:
    """Parse and check a completion. `known`: the prompt with which its prompt probably begins.

    Raises `RolloutFailed`: VALIDATION with the turn and the field, or TRAINER_SERVER for a completion that was aborted.
    """
    try:
        parsed = decode_response(_decoder, body)
        reported, prompt_text = _read_prompt(bytes(parsed.prompt_token_ids), known)
    except MalformedMessage as error:
        raise _malformed(turn, str(error)) from None
    if not parsed.choices:
        raise _malformed(turn, "`choices` is empty")
    choice = parsed.choices[0]
    if bytes(choice.message) == b"null":
        raise _malformed(turn, "`choices[0].message` is missing")
    if parsed.token_ids is None and ids_needed:
        raise _malformed(
            turn, "`token_ids` is missing, so no mask can be made; the trainer must return the sampled token ids"
        )
    try:
        message, calls = read_message(choice.message, most_calls)
    except MalformedMessage as error:
        raise _malformed(turn, f"`choices[0].message`: {error}", error) from None
    if choice.finish_reason == ABORTED:
        raise _aborted(turn)
    return ChatCompletion(
        message=message,
        tool_calls=calls,
        finish_reason=choice.finish_reason or "",
        token_ids=pack_tokens(parsed.token_ids) if parsed.token_ids is not None else None,
        reported=reported,
        logprobs=_logprobs(parsed.logprobs, len(parsed.token_ids)) if parsed.token_ids is not None else None,
        usage=read_usage(parsed.usage),
        prompt_text=prompt_text,
    )


def read_message(raw: msgspec.Raw, most_calls: int) -> tuple[Message, int]:
    """Return the completion's message, verbatim, and its number of tool calls. Raises `MalformedMessage`."""
    data = bytes(raw)
    check_message(data, most_calls)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise MalformedMessage(str(error)) from None
    fields = parse_object(text)
    message = Message.parsed(text, fields)
    if message.role != "assistant":
        # The error does not quote the role: a hostile trainer may put the API key there that it received.
        raise MalformedMessage('role is not "assistant"')
    _check_content(fields)
    return message, len(tool_calls(fields))


async def read_chat_completion(
    body: bytes, request: CompletionRequest, prompts: ReportedPrompts, *, ids_needed: bool, most_calls: int
) -> ChatCompletion:
    """Call `parse_chat_completion`; a body with much new text is parsed in a thread, so that the event loop is not blocked."""
    known, turn = prompts.earlier(request), request.asked.turn
    # To skip known ids takes a fifth of the time in which new ones are decoded.
    size = len(body) - (0 if known is None else known.size * 4 // 5)
    completion = await offload_response(
        lambda: parse_chat_completion(body, turn, ids_needed=ids_needed, most_calls=most_calls, known=known), size
    )
    prompts.add(turn, completion)
    return completion


def _read_prompt(text: bytes, known: EarlierPrompt | None) -> tuple[Tokens | None, tuple[int, bytes]]:
    """Return the ids of a prompt, given as JSON text, and size and digest of the text. Raises `MalformedMessage`."""
    end = len(text.rstrip(b"] \n\r\t"))
    if known is not None and known.size <= end:
        digest = hashlib.sha256(memoryview(text)[: known.size])
        rest = text[known.size :].lstrip()
        # Otherwise the last known id goes on: 12 is not the id of 123.
        if digest.digest() == known.digest and rest[:1] in (b",", b"]"):
            digest.update(memoryview(text)[known.size : end])
            with suppress(MalformedMessage):  # the error of the whole prompt names the right index
                ids = _prompt_ids(b"[" + rest.removeprefix(b","))
                return known.ids + (ids or pack_tokens()), (end, digest.digest())
    return _prompt_ids(text), (end, hashlib.sha256(memoryview(text)[:end]).digest())


def _prompt_ids(text: bytes) -> Tokens | None:
    ids = decode_response(_prompt_decoder, b'{"prompt_token_ids":' + text + b"}").prompt_token_ids
    return None if ids is None else pack_tokens(ids)


def _check_content(fields: Mapping[str, JSON]) -> None:
    content = fields.get("content")
    if content is not None and not isinstance(content, str | list):
        raise MalformedMessage("content is neither a string nor a list")


def read_usage(raw: msgspec.Raw) -> tuple[int, int] | None:
    """Return prompt tokens and completion tokens; None if they are missing or malformed."""
    try:
        found = _usage_decoder.decode(raw)
    except msgspec.DecodeError:
        return None
    return (found.prompt_tokens, found.completion_tokens) if found is not None else None


def _logprobs(raw: msgspec.Raw, length: int) -> Logprobs | None:
    """Return the logprobs. None if they are missing, malformed, not finite as 32-bit floats, or not one per token."""
    try:
        values = _logprobs_decoder.decode(raw)
    except msgspec.DecodeError:
        return None
    packed = pack_logprobs(values)
    return packed if len(packed) == length and all(map(isfinite, packed)) else None


def _aborted(turn: int) -> RolloutFailed:
    """Return the failure of a turn with a part of a completion: only gRPC can request the rest of it (docs/masks.md)."""
    text = (
        f"turn {turn}: the trainer aborted the completion (finish_reason '{ABORTED}'), and its HTTP API cannot resume it: return a "
        "whole completion, or 503 with Retry-After"
    )
    return RolloutFailed(Failure(Category.TRAINER_SERVER, text, turn, source=FailureClass.TRAINER))


def _malformed(turn: int, what: str, error: MalformedMessage | None = None) -> RolloutFailed:
    text = f"turn {turn}: the trainer's completion is malformed: {what}"
    source = class_of_response_error(error, FailureClass.TRAINER)
    return RolloutFailed(Failure(Category.VALIDATION, text, turn, source=source))

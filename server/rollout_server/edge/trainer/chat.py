"""OpenAI-style chat completions with response_mask, as the synchronous dialect has them.

The request's history only grows, so its bytes are kept and new messages are added to them. The answer's message is taken as
the slice of text that it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Annotated

import msgspec

from rollout_server.core.ledger import MAX_TOKEN_ID, Logprobs, Tokens, pack_logprobs, pack_tokens
from rollout_server.core.message import JSON, MalformedMessage, Message, parse_object, tool_calls
from rollout_server.core.outcome import Category, Failure
from rollout_server.core.spec import Sampling
from rollout_server.runtime.port import Failed

_TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]
_OWN_KEYS = frozenset(
    {"model", "rollout_id", "messages", "temperature", "top_p", "max_tokens", "stop", "logprobs", "response_mask"}
)


_NULL = msgspec.Raw(b"null")


class _Choice(msgspec.Struct):
    message: msgspec.Raw = _NULL
    finish_reason: str | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice]
    token_ids: list[_TokenId] | None = None
    prompt_token_ids: list[_TokenId] | None = None
    logprobs: msgspec.Raw = _NULL


class Answer(msgspec.Struct, frozen=True):
    """A trainer's answer, checked. `logprobs` is as long as `token_ids`, or None where the trainer sent none that fit."""

    message: Message
    tool_calls: int
    finish_reason: str
    token_ids: Tokens
    reported: Tokens | None
    logprobs: Logprobs | None


_decoder = msgspec.json.Decoder(_Body)
_raw_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_logprobs_decoder = msgspec.json.Decoder(list[float])


class RequestWriter:
    """Writes the requests of one rollout."""

    def __init__(self, rollout_id: str, sampling: Sampling) -> None:
        self._head = f'{{"model":"default","rollout_id":{json.dumps(rollout_id)},"messages":['.encode()
        self._tail = f"],{_parameters(sampling)}".encode()
        self._history = bytearray()
        self._messages = 0

    def write(self, messages: Sequence[Message], mask_length: int | None) -> bytes:
        """The body for a conversation that extends the one written before. `mask_length` None or 0 is a null mask."""
        for message in messages[self._messages :]:
            if self._history:
                self._history += b","
            self._history += message.text.encode()
        self._messages = len(messages)
        mask = b"[" + b"0," * (mask_length - 1) + b"0]" if mask_length else b"null"
        return b"".join((self._head, self._history, self._tail, b',"response_mask":', mask, b"}"))


def _parameters(sampling: Sampling) -> str:
    known = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "logprobs": sampling.logprobs,
    }
    fields: dict[str, object] = {key: value for key, value in known.items() if value is not None}
    fields["stop"] = list(sampling.stop) or None
    written = json.dumps(fields, ensure_ascii=True)[1:-1]
    extra = _raw_decoder.decode(sampling.extra_json) if sampling.extra_json else {}
    parts = (f"{json.dumps(key)}: {bytes(value).decode()}" for key, value in extra.items() if key not in _OWN_KEYS)
    return ", ".join((written, *parts))


def read_answer(body: bytes, turn: int) -> Answer:
    """Parses and checks an answer. Raises `Failed` with VALIDATION, naming turn and field."""
    try:
        parsed = _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _malformed(turn, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(turn, f"it is not JSON: {error}") from None
    if not parsed.choices:
        raise _malformed(turn, "`choices` is empty")
    choice = parsed.choices[0]
    if bytes(choice.message) == b"null":
        raise _malformed(turn, "`choices[0].message` is missing")
    if parsed.token_ids is None:
        raise _malformed(
            turn, "`token_ids` is missing, so no mask can be made; the trainer must return the ids it sampled"
        )
    try:
        text = bytes(choice.message).decode()
        fields = parse_object(text)
        message = Message.parsed(text, fields)
        if message.role != "assistant":
            raise MalformedMessage(f'role is {message.role[:40]!r}, "assistant" is needed')
        _check_content(fields)
        calls = len(tool_calls(fields))
    except (MalformedMessage, UnicodeDecodeError) as error:
        raise _malformed(turn, f"`choices[0].message`: {error}") from None
    return Answer(
        message=message,
        tool_calls=calls,
        finish_reason=choice.finish_reason or "",
        token_ids=pack_tokens(parsed.token_ids),
        reported=pack_tokens(parsed.prompt_token_ids) if parsed.prompt_token_ids is not None else None,
        logprobs=_logprobs(parsed.logprobs, len(parsed.token_ids)),
    )


def _check_content(fields: Mapping[str, JSON]) -> None:
    content = fields.get("content")
    if content is not None and not isinstance(content, str | list):
        raise MalformedMessage("content is neither a string nor a list")


def _logprobs(raw: msgspec.Raw, length: int) -> Logprobs | None:
    """The logprobs, or None where they are absent, of another length or shape, or no 32-bit numbers."""
    try:
        values = _logprobs_decoder.decode(raw)
    except msgspec.DecodeError:
        return None
    packed = pack_logprobs(values)
    return packed if len(packed) == length and all(map(isfinite, packed)) else None


def _malformed(turn: int, what: str) -> Failed:
    return Failed(Failure(Category.VALIDATION, f"turn {turn}: the trainer's answer is malformed: {what}", turn))

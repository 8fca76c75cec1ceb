"""Parts of records in the journal's encoding: texts, arrays, messages, tool calls.

A `write_...` function fills a proto in place: a submessage that is made apart is copied into its parent, with all its arrays. A
`read_...` function returns the core value, and raises ValueError or KeyError for a proto that no server has written.
"""

from __future__ import annotations

import json
import sys
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from osmosis.journal.v1 import journal_pb2 as pb

from rollout_server.core.ledger import Logprobs, Role, Tokens, pack_logprobs, pack_tokens
from rollout_server.core.message import JSON, Message, ToolCall
from rollout_server.core.outcome import Warned

_SWAPS = sys.byteorder == "big"
_Array = TypeVar("_Array", "array[int]", "array[float]")


class _Messages(Protocol):
    """The type of a repeated field of messages."""

    def add(self) -> pb.Message:
        """Append an empty message and return it."""


def encode_text(text: str) -> bytes:
    """Return UTF-8, in which lone surrogates are encoded like other code points."""
    return text.encode("utf-8", "surrogatepass")


def decode_text(data: bytes) -> str:
    """Return the text of `encode_text`."""
    return data.decode("utf-8", "surrogatepass")


def checksum(number: int, data: bytes) -> int:
    """Return the CRC-32 of bytes of the rollout or group with this number. With another number it differs, too."""
    return zlib.crc32(data, number & 0xFFFFFFFF)


def encode_tokens(tokens: Tokens) -> bytes:
    """Return token ids as little-endian unsigned 32-bit integers."""
    return _little_endian(tokens)


def decode_tokens(data: bytes) -> Tokens:
    """Return the token ids of `encode_tokens`."""
    return _read_array(pack_tokens(), data)


def encode_logprobs(logprobs: Logprobs) -> bytes:
    """Return logprobs as little-endian 32-bit floats."""
    return _little_endian(logprobs)


def decode_logprobs(data: bytes) -> Logprobs:
    """Return the logprobs of `encode_logprobs`, with the same bits."""
    return _read_array(pack_logprobs(), data)


def _little_endian(values: Tokens | Logprobs) -> bytes:
    if _SWAPS:
        values = values[:]
        values.byteswap()
    return values.tobytes()


def _read_array(empty: _Array, data: bytes) -> _Array:
    empty.frombytes(data)
    if _SWAPS:
        empty.byteswap()
    return empty


def write_message(message: Message, proto: pb.Message) -> None:
    """Write a message with its text verbatim."""
    proto.text = encode_text(message.text)
    proto.role = encode_text(message.role)


def read_message(proto: pb.Message) -> Message:
    """Return the message. Its text is not parsed."""
    return Message(decode_text(proto.text), decode_text(proto.role))


def write_messages(messages: Iterable[Message], protos: _Messages) -> None:
    """Append messages to a repeated field."""
    for message in messages:
        write_message(message, protos.add())


def read_messages(protos: Iterable[pb.Message]) -> tuple[Message, ...]:
    """Return the messages of a repeated field."""
    return tuple(map(read_message, protos))


def write_call(call: ToolCall, proto: pb.ToolCall) -> None:
    """Write a tool call. Arguments that are text stay text."""
    proto.id = encode_text(call.id)
    proto.name = encode_text(call.name)
    if isinstance(call.arguments, str):
        proto.text = encode_text(call.arguments)
    else:
        proto.object_json = encode_text(json.dumps(call.arguments, ensure_ascii=False, default=dict))


def read_call(proto: pb.ToolCall) -> ToolCall:
    """Return the tool call."""
    form = proto.WhichOneof("arguments")
    if form is None:
        raise ValueError("a tool call has no arguments")
    arguments = decode_text(proto.text) if form == "text" else _object(proto.object_json)
    return ToolCall(decode_text(proto.id), decode_text(proto.name), arguments)


def _object(data: bytes) -> Mapping[str, JSON]:
    value = json.loads(decode_text(data))
    if not isinstance(value, dict):
        raise ValueError("the arguments of a tool call are not a JSON object")
    return value


def write_usage(usage: tuple[int, int], proto: pb.TokenUsage) -> None:
    """Write the numbers of prompt and completion tokens."""
    proto.prompt_tokens, proto.completion_tokens = usage
    proto.SetInParent()


def read_usage(proto: pb.TokenUsage) -> tuple[int, int]:
    """Return the numbers of prompt and completion tokens."""
    return proto.prompt_tokens, proto.completion_tokens


def write_excerpt(around: tuple[str, str], proto: pb.Excerpt) -> None:
    """Write the expected and the reported text; nothing if both are empty."""
    if around != ("", ""):
        proto.expected, proto.reported = map(encode_text, around)


def read_excerpt(proto: pb.Excerpt) -> tuple[str, str]:
    """Return the expected and the reported text."""
    return decode_text(proto.expected), decode_text(proto.reported)


def write_role(role: Role, proto: pb.Role) -> None:
    """Write the role of a conversation."""
    proto.name = encode_text(role.name)
    proto.trainable = role.trainable
    proto.model = encode_text(role.model)


def read_role(proto: pb.Role) -> Role:
    """Return the role of a conversation."""
    return Role(decode_text(proto.name), proto.trainable, decode_text(proto.model))


def write_numbers(numbers: Mapping[str, float], proto: pb.NamedNumbers) -> None:
    """Write numbers with names in their order. An empty mapping is not the same as none."""
    proto.SetInParent()
    for name, value in numbers.items():
        proto.numbers.add(name=encode_text(name), value=value)


def read_numbers(proto: pb.NamedNumbers) -> dict[str, float]:
    """Return numbers by name in their order."""
    return {decode_text(each.name): each.value for each in proto.numbers}


def warning_to_proto(warning: Warned) -> pb.Warned:
    """Return the proto of a warning."""
    code, message = encode_text(warning.code), encode_text(warning.message)
    return pb.Warned(code=code, message=message, turn=warning.turn, index=warning.index)


def read_warnings(protos: Sequence[pb.Warned]) -> tuple[Warned, ...]:
    """Return the warnings of a repeated field."""
    return tuple(
        Warned(
            decode_text(each.code), decode_text(each.message), each.turn, each.index if each.HasField("index") else None
        )
        for each in protos
    )

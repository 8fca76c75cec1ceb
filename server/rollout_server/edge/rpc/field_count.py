"""Counts the fields of an encoded protobuf message before it is parsed.

An encoded field may take two bytes (an empty message in a repeated field) and hundreds once parsed. A limit on bytes therefore
bounds neither memory nor work; a limit on fields bounds both. The wire format is described at
https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Final

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

MAX_FIELDS: Final = 50_000
"""Maximum fields of one request, including those of nested messages. A packed list of numbers is one field."""

_VARINT, _BYTES = 0, 2
_FIXED: Final[Mapping[int, int]] = MappingProxyType({1: 8, 5: 4})


class TooManyFields(Exception):
    """A message has more fields than allowed."""


def check_fields(payload: bytes, descriptor: Descriptor, most: int = MAX_FIELDS) -> None:
    """Raise `TooManyFields` for more than `most` fields, and DecodeError for a malformed message.

    The running time grows with the number of fields, not bytes.
    """
    count, at, end = 0, 0, len(payload)
    fields = _messages(descriptor)
    outer: list[tuple[int, Mapping[int, Descriptor]]] = []
    while True:
        while at == end:
            if not outer:
                return
            end, fields = outer.pop()
        count += 1
        if count > most:
            raise TooManyFields
        tag, at = _varint(payload, at)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(payload, at)
        elif kind in _FIXED:
            at += _FIXED[kind]
        elif kind == _BYTES:
            size, at = _varint(payload, at)
            inner = fields.get(tag >> 3)
            if inner is None:
                at += size
            elif at + size <= end:
                outer.append((end, fields))
                end, fields = at + size, _messages(inner)
            else:
                raise DecodeError("a message exceeds the enclosing one")
        else:  # groups, which the contract does not use
            raise DecodeError(f"a field has the wire type {kind}")
        if at > end:
            raise DecodeError("a field exceeds its message")


@cache
def _messages(descriptor: Descriptor) -> Mapping[int, Descriptor]:
    """Return the fields of a message that are messages themselves, by number."""
    return {field.number: field.message_type for field in descriptor.fields if field.message_type is not None}


def _varint(payload: bytes, at: int) -> tuple[int, int]:
    """Return the varint at position `at` and the position after it. Raise DecodeError."""
    value = shift = 0
    while at < len(payload) and shift < 70:
        byte = payload[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise DecodeError("a varint does not end")

"""How many fields an encoded protobuf message holds, counted before it is parsed: an empty one of two bytes becomes an object."""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5


def check_fields(data: bytes, of: Descriptor, most: int) -> None:
    """Raises ValueError for more than `most` fields, those of nested messages included, and for what is no message.

    A packed list, such as one of token ids, is one field: its values are numbers beside each other, not objects.
    """
    open_, fields = [(0, len(data), of)], 0
    while open_:
        at, end, message = open_.pop()
        while at < end:
            fields += 1
            if fields > most:
                raise ValueError(f"it holds more than {most} fields, which is the most that is read")
            tag, at = _varint(data, at)
            kind = tag & 7
            if kind == _VARINT:
                _, at = _varint(data, at)
            elif kind == _DELIMITED:
                length, at = _varint(data, at)
                field = message.fields_by_number.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    open_.append((at, min(at + length, end), field.message_type))
                at += length
            elif kind in (_FIXED32, _FIXED64):
                at += 4 if kind == _FIXED32 else 8
            else:
                raise ValueError("it is no protobuf message")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("it is no protobuf message")

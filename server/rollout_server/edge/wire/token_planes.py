"""Token planes and further fields of a trainer's completion. They are checked and passed on, not interpreted."""

from __future__ import annotations

import re
from collections.abc import Sequence

from osmosis.rollout.v1 import token_pb2

from rollout_server.core.message import MalformedMessage, parse_object
from rollout_server.core.segment import Plane

_MOST_PLANES = 16
_MOST_NAME = 64
_MOST_EXTRA = 65_536
# NumPy names of fixed-size types end with their number of bits, such as "uint8". Small floats continue with their format, such as
# "float8_e4m3fn".
_DTYPE = re.compile(r"bool|(?:u?int|b?float|complex)(?P<bits>[0-9]{1,4})(?:_[a-z0-9]{1,16})?")


def planes_from_proto(protos: Sequence[token_pb2.TokenPlane], tokens: int) -> tuple[Plane, ...]:
    """Return the planes of a completion with `tokens` tokens. Raises ValueError, which names the invalid field."""
    if len(protos) > _MOST_PLANES:
        raise ValueError(f"planes: has {len(protos)} entries, at most {_MOST_PLANES} are allowed")
    names = [proto.name for proto in protos]
    for index, proto in enumerate(protos):
        where, length = f"planes[{index}]", len(proto.values)
        if not 0 < len(proto.name) <= _MOST_NAME or names.index(proto.name) != index:
            raise ValueError(f"{where}.name: must be unique and have 1 to {_MOST_NAME} characters")
        size = _size(proto.dtype)
        if size is None:
            raise ValueError(f"{where}.dtype: is not an element type of fixed size, such as uint8 or float32")
        divides = length % (tokens * size) == 0 if tokens else not length
        if not divides or (tokens and not length):
            raise ValueError(
                f"{where}.values: {length} bytes are not a whole number of {size}-byte elements for each of {tokens} tokens"
            )
    return tuple(Plane(proto.name, proto.dtype, proto.values) for proto in protos)


def extra_from_proto(text: str) -> str:
    """Return the text if it is one JSON object or empty. Raises ValueError otherwise, or if it is too long."""
    if len(text) > _MOST_EXTRA:
        raise ValueError(f"extra_json: has {len(text)} characters, at most {_MOST_EXTRA} are allowed")
    try:
        if text:
            parse_object(text)
    except MalformedMessage as error:
        raise ValueError(f"extra_json: {error}") from None
    return text


def _size(dtype: str) -> int | None:
    """Return the size of an element in bytes; None for a type without a fixed size in whole bytes."""
    found = _DTYPE.fullmatch(dtype)
    if found is None:
        return None
    bits = int(found["bits"] or 8)
    return bits // 8 if bits and bits % 8 == 0 else None

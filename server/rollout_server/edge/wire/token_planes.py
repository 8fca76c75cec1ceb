"""Planes and further fields of a trainer's answers: carried, not understood."""

from __future__ import annotations

import re
from collections.abc import Sequence

from osmosis.rollout.v1 import token_pb2

from rollout_server.core.message import MalformedMessage, parse_object
from rollout_server.core.segment import Plane

_MOST_PLANES = 16
_MOST_NAME = 64
_MOST_EXTRA = 65_536
# NumPy's names of fixed size end in their bits, such as "uint8"; those of the small floats name their parts behind them.
_DTYPE = re.compile(r"bool|(?:u?int|b?float|complex)(?P<bits>[0-9]{1,4})(?:_[a-z0-9]{1,16})?")


def planes_from_proto(protos: Sequence[token_pb2.TokenPlane], tokens: int) -> tuple[Plane, ...]:
    """Planes of so many tokens. Raises ValueError naming the field that breaks the contract."""
    if len(protos) > _MOST_PLANES:
        raise ValueError(f"planes: there are {len(protos)}, at most {_MOST_PLANES} are taken")
    names = [proto.name for proto in protos]
    for index, proto in enumerate(protos):
        where, length = f"planes[{index}]", len(proto.values)
        if not 0 < len(proto.name) <= _MOST_NAME or names.index(proto.name) != index:
            raise ValueError(f"{where}.name: must be one of its own, of 1 to {_MOST_NAME} characters")
        size = _size(proto.dtype)
        if size is None:
            raise ValueError(f"{where}.dtype: is no element type of a fixed size, such as uint8 or float32")
        whole = length % (tokens * size) == 0 if tokens else not length
        if not whole or (tokens and not length):
            raise ValueError(
                f"{where}.values: {length} bytes are no whole number of {size}-byte elements for each of {tokens} tokens"
            )
    return tuple(Plane(proto.name, proto.dtype, proto.values) for proto in protos)


def extra_from_proto(text: str) -> str:
    """One JSON object, or empty. Raises ValueError."""
    if len(text) > _MOST_EXTRA:
        raise ValueError(f"extra_json: has {len(text)} characters, at most {_MOST_EXTRA} are taken")
    try:
        if text:
            parse_object(text)
    except MalformedMessage as error:
        raise ValueError(f"extra_json: {error}") from None
    return text


def _size(dtype: str) -> int | None:
    """Bytes of an element; None for a type that has no fixed size, or none in whole bytes."""
    found = _DTYPE.fullmatch(dtype)
    if found is None:
        return None
    bits = int(found["bits"] or 8)
    return bits // 8 if bits and bits % 8 == 0 else None

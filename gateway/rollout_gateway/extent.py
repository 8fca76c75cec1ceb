"""How much a JSON text holds, counted before it is parsed: parsed values take up to a hundred times the bytes of their text."""

from itertools import accumulate
from typing import Final

#: Long rollouts have some thousand messages of some ten values each; these leave room.
MAX_VALUES: Final = 1_000_000
MAX_DEPTH: Final = 256

_PIECE: Final = 64 * 1024
_STEPS: Final = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in _STEPS)


class TooMuch(ValueError):
    """The text holds more than may be parsed; the text of the error says of what."""


def most_values(content: bytes | bytearray) -> int:
    """At least as many values as the text holds; a cheap look, which also counts commas and brackets within strings."""
    return 1 + content.count(b",") + content.count(b"[") + content.count(b"{")


def demand_bounded(content: bytes, max_values: int = MAX_VALUES, max_depth: int = MAX_DEPTH) -> None:
    """Raises TooMuch for a text of more values, or of more brackets within each other.

    What is no JSON passes as far as it is none: a parser stops there.
    """
    if most_values(content) <= min(max_values, max_depth):
        return
    # Without escapes every quote begins or ends a string.
    text = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    values, depth, in_string = 1, 0, 0
    for start in range(0, len(text), _PIECE):
        parts = text[start : start + _PIECE].split(b'"')
        outside = b"".join(parts[in_string::2])
        in_string ^= (len(parts) - 1) & 1
        values += most_values(outside) - 1
        if values > max_values:
            raise TooMuch(f"more than {max_values} values")
        depths = list(accumulate(map(_STEPS.__getitem__, outside.translate(None, _NO_BRACKETS)), initial=depth))
        if max(depths) > max_depth:
            raise TooMuch(f"nested deeper than {max_depth}")
        depth = depths[-1]

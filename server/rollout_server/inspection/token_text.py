"""Which text belongs to which tokens.

A token need not be a text: one character may be several tokens, and some tokenizers write a token differently at the start. So
text is what a decoded sequence grows by, and tokens that only together make characters stay together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""The text of token ids, special ones too."""

_INCOMPLETE = "\ufffd"
# No character has more tokens; without a limit a hostile sequence would be decoded again and again from its start.
_LONGEST = 16


@dataclass(frozen=True, slots=True)
class TokenText:
    """Tokens from `start` to before `stop`, and their text; None: it cannot be told."""

    start: int
    stop: int
    text: str | None


def split_token_texts(ids: Sequence[int], decode: Decode | None, cuts: Iterable[int] = ()) -> list[TokenText]:
    """The tokens in order, each in exactly one text; none reaches over one of the `cuts`. Without `decode` no text is known."""
    if decode is None:
        return [TokenText(index, index + 1, None) for index in range(len(ids))]
    ends = {*cuts, len(ids)}
    found: list[TokenText] = []
    context = start = 0  # the text before `start` decides how the next token is written
    for stop in range(1, len(ids) + 1):
        text = _added_text(decode, ids[context:stop], start - context)
        whole = bool(text) and not text.endswith(_INCOMPLETE)
        if not whole and stop not in ends and stop - start < _LONGEST:
            continue
        found.append(TokenText(start, stop, text or None))
        context, start = (start if whole else stop), stop
    return found


def decoded_text(ids: Sequence[int], decode: Decode | None) -> str | None:
    """The text of tokens that stand alone; None where it cannot be told."""
    return None if decode is None else _decode(decode, ids) or None


def _added_text(decode: Decode, ids: Sequence[int], known: int) -> str:
    """What the text of the first `known` tokens grows by with the others."""
    before, after = _decode(decode, ids[:known]) if known else "", _decode(decode, ids)
    return after[len(before) :] if after.startswith(before) else _decode(decode, ids[known:])


def _decode(decode: Decode, ids: Sequence[int]) -> str:
    try:
        return decode(ids)
    except Exception:  # ids come from a foreign vocabulary, and tokenizers raise whatever their readers do
        return ""

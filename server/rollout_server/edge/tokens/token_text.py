"""Assignment of decoded text to tokens.

Tokens cannot be decoded one by one: a character may span several tokens, and some tokenizers decode a token differently at the
start of a sequence. The text of a token is therefore what the decoded sequence grows by. Tokens that form a character together
share a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Decodes token ids to text, including special tokens."""

_INCOMPLETE = "\ufffd"
# More tokens than any character has. Without a limit, decoding a hostile sequence would take quadratic time.
_MAX_TOKENS = 16
CONTEXT_TOKENS = 64
"""The most tokens on either side of a window that its texts depend on."""


@dataclass(frozen=True, slots=True)
class TokenText:
    """The tokens `start` to `stop` (exclusive) and their text; None if they cannot be decoded."""

    start: int
    stop: int
    text: str | None


def split_token_texts(ids: Sequence[int], decode: Decode | None, cuts: Iterable[int] = ()) -> list[TokenText]:
    """Split tokens into texts, in order, each token in exactly one text.

    Args:
        ids: token ids of a segment.
        decode: decodes token ids; None leaves all texts unknown.
        cuts: token indices that no text may cross.
    """
    if decode is None:
        return [TokenText(index, index + 1, None) for index in range(len(ids))]
    ends = {*cuts, len(ids)}
    found: list[TokenText] = []
    # Decoding starts at `context`, because the text of a token depends on the tokens before it.
    context = start = 0
    for stop in range(1, len(ids) + 1):
        text = _added_text(decode, ids[context:stop], start - context)
        complete = bool(text) and not text.endswith(_INCOMPLETE)
        if not complete and stop not in ends and stop - start < _MAX_TOKENS:
            continue
        found.append(TokenText(start, stop, text or None))
        context, start = (start if complete else stop), stop
    return found


def window_token_texts(
    ids: Sequence[int], decode: Decode, start: int, stop: int, cuts: Iterable[int] = ()
) -> list[TokenText]:
    """Return the texts that tokens from `start` to before `stop` are part of, as `split_token_texts` returns them for all.

    Decodes only these tokens and a few around them, so that the windows of a segment together cost as much as all of it. Windows
    agree about each token if the tokens around them are text. In a long run of tokens that are not, the split may differ.
    """
    if start >= stop:
        return []
    first = _context_start(ids, decode, start)
    last = min(len(ids), stop + _MAX_TOKENS)
    found = split_token_texts(ids[first:last], decode, [cut - first for cut in cuts if first < cut < last])
    placed = (TokenText(each.start + first, each.stop + first, each.text) for each in found)
    return [each for each in placed if each.stop > start and each.start < stop]


def _context_start(ids: Sequence[int], decode: Decode, start: int) -> int:
    """Return the nearest token before `start` after which a text ends whatever comes before, or the furthest to look at."""
    furthest = max(0, start - CONTEXT_TOKENS)
    for index in range(start - 1, furthest, -1):
        text = _decode(decode, ids[index : index + 1])
        if text and _INCOMPLETE not in text:
            return index
    return furthest


def decoded_text(ids: Sequence[int], decode: Decode | None) -> str | None:
    """Return the text of a token sequence without context; None if it cannot be decoded."""
    return None if decode is None else _decode(decode, ids) or None


def _added_text(decode: Decode, ids: Sequence[int], known: int) -> str:
    """Return the text that the tokens after the first `known` add to the decoded sequence."""
    before, after = _decode(decode, ids[:known]) if known else "", _decode(decode, ids)
    return after[len(before) :] if after.startswith(before) else _decode(decode, ids[known:])


def _decode(decode: Decode, ids: Sequence[int]) -> str:
    try:
        return decode(ids)
    except Exception:  # ids may be outside the vocabulary, and tokenizers raise various exceptions for them
        return ""

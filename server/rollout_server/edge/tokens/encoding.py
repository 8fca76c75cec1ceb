"""Encoding a text that grows: what did not change keeps its ids (docs/design.md, R5).

A tokenizer looks for its added tokens first, from left to right, and encodes what lies between them each for itself. So an
encoding falls apart at an added token: the ids before it depend on nothing behind it, and those from it on depend on nothing
before it. An added token is only a sure place to cut while the longest of them, begun at the same character, would end
before the first change: otherwise a longer one might be found there instead.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from rollout_server.core.ledger import Tokens, pack_tokens
from rollout_server.core.segment import first_difference

Backend: TypeAlias = Any
"""A `tokenizers.Tokenizer`, which has no types."""


class AddedToken(Protocol):
    """A token that was added to a vocabulary by name."""

    content: str
    special: bool
    normalized: bool


def _no_offsets() -> array[int]:
    return array("q")


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text and its ids, with the places of its added tokens: `starts` in characters, `offsets` in ids, both rising."""

    text: str = ""
    ids: Tokens = field(default_factory=pack_tokens)
    starts: array[int] = field(default_factory=_no_offsets)
    offsets: array[int] = field(default_factory=_no_offsets)

    def behind(self, token_id: int, start: int) -> Tokens | None:
        """The ids behind the added token that begins at character `start`; None where it is not known to."""
        index = bisect_left(self.starts, start)
        if index == len(self.starts) or self.starts[index] != start or self.ids[self.offsets[index]] != token_id:
            return None
        return self.ids[self.offsets[index] + 1 :]


class GrowingEncoder:
    """Encodes texts by what they have in common with the one before. `whole` encodes a text as it stands.

    Only for tokenizers of the Rust library, which tell where in the text a token stands. Tokens that are looked for in the
    normalised text are no places to cut: the search for them begins anew behind each one that is not.
    """

    def __init__(self, backend: Backend, added: Mapping[int, AddedToken]) -> None:
        self._backend = backend
        self._cuts = {index: token.content for index, token in added.items() if token.content and not token.normalized}
        self._longest = max(map(len, self._cuts.values()), default=0)

    def whole(self, text: str) -> Encoded:
        """Encodes a text from its start. Raises what the library raises."""
        return self._behind(Encoded(), text, 0)

    def grown(self, before: Encoded, text: str) -> Encoded:
        """The same as `whole(text)`, for the price of what `text` does not share with `before`."""
        if text == before.text:
            return before
        safe = common_prefix(before.text, text) - self._longest
        last = bisect_right(before.starts, safe) - 1
        if last < 0:
            return self.whole(text)
        offset = before.offsets[last]
        kept = Encoded("", before.ids[:offset], before.starts[:last], before.offsets[:last])
        return self._behind(kept, text, before.starts[last])

    def _behind(self, kept: Encoded, text: str, start: int) -> Encoded:
        """`kept` and the encoding of the text from `start` on."""
        # A batch, because the library lets other threads run only then.
        (encoding,) = self._backend.encode_batch([text[start:]], add_special_tokens=False)
        ids = pack_tokens(encoding.ids)
        starts, offsets = array("q", kept.starts), array("q", kept.offsets)
        for position, index in enumerate(ids):
            content = self._cuts.get(index)
            if content is None:
                continue
            first, last = (start + offset for offset in encoding.token_to_chars(position))
            if content in text[first:last]:  # else it was made of a text that only became the token's when normalised
                starts.append(first)
                offsets.append(len(kept.ids) + position)
        return Encoded(text, kept.ids + ids, starts, offsets)


def composes(encoder: GrowingEncoder, sample: str, encode: Callable[[str], Tokens]) -> bool:
    """Whether encoding by parts gives what the tokenizer gives, seen at every added token of a sample."""
    whole = encoder.whole(sample)
    if whole.ids != encode(sample):
        return False
    ends = {*whole.starts, *(start + 1 for start in whole.starts), len(sample) // 2, len(sample)}
    return all(encoder.grown(encoder.whole(sample[:end]), sample).ids == whole.ids for end in ends)


def common_prefix(a: str, b: str) -> int:
    """How many characters at their start are the same."""
    if b.startswith(a):
        return len(a)
    return first_difference(a, b)

"""Incremental encoding: re-encode only what changed in a growing text (docs/design.md, R5).

A tokenizer first searches its added tokens from left to right, and then encodes each stretch between them separately. BPE does
not merge across an added token. So the encoding splits at an added token: the ids before it do not depend on the text after it,
and the ids from it on do not depend on the text before it.

An added token is a safe split point only if the longest added token, starting at the same character, would still end before the
first changed character. Otherwise the changed text could complete a longer added token at this place.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol, TypeAlias

from rollout_server.core.ledger import Tokens, pack_tokens
from rollout_server.core.segment import first_difference

Backend: TypeAlias = Any
"""A `tokenizers.Tokenizer`; the library has no type annotations."""


_SHORT = 1000
"""In characters. A shorter text is encoded before another thread would have begun."""
_OPENING_CHARACTERS = 8_000_000
"""Maximum number of characters of all first prompts that a tokenizer keeps."""


class AddedToken(Protocol):
    """An entry of a tokenizer's added vocabulary."""

    content: str
    special: bool
    normalized: bool
    single_word: bool


def _no_offsets() -> array[int]:
    return array("q")


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text, its token ids and the positions of its added tokens.

    Args:
        text: the encoded text.
        ids: its token ids.
        starts: the character index at which each added token begins, ascending.
        offsets: the index of each added token in `ids`, ascending; as long as `starts`.
    """

    text: str = ""
    ids: Tokens = field(default_factory=pack_tokens)
    starts: array[int] = field(default_factory=_no_offsets)
    offsets: array[int] = field(default_factory=_no_offsets)

    def behind(self, token_id: int, start: int) -> Tokens | None:
        """Return the ids after the added token `token_id` that begins at character `start`; None if it is not known to be there."""
        index = bisect_left(self.starts, start)
        if index == len(self.starts) or self.starts[index] != start or self.ids[self.offsets[index]] != token_id:
            return None
        return self.ids[self.offsets[index] + 1 :]


class GrowingEncoder:
    """Encode a text by reusing the ids that it shares with the text encoded before.

    Works only with tokenizers of the Rust library, which report the character range of each token. Added tokens with
    `normalized=True` are not used as split points: the library searches them in the normalized text, and restarts the search
    after each match. Those with `single_word=True` are not used either: the character after one decides whether it is one.
    """

    def __init__(self, backend: Backend, added: Mapping[int, AddedToken]) -> None:
        self._backend = backend
        found = {index: token for index, token in added.items() if token.content and not token.normalized}
        self._cuts = {index: token.content for index, token in found.items() if not token.single_word}
        self._longest = max((len(token.content) for token in found.values()), default=0)

    def ids(self, text: str) -> Tokens:
        """Return the ids of a text. Raises what the library raises."""
        return pack_tokens(self._encoding(text).ids)

    def whole(self, text: str) -> Encoded:
        """Encode a text from its start. Raises what the library raises."""
        return self._behind(Encoded(), text, 0)

    def grown(self, before: Encoded, text: str) -> Encoded:
        """Return `whole(text)`, but encode only the part of `text` that `before` does not share."""
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
        """Return `kept` extended by the encoding of `text[start:]`."""
        encoding = self._encoding(text[start:])
        ids = pack_tokens(encoding.ids)
        starts, offsets = array("q", kept.starts), array("q", kept.offsets)
        for position, index in enumerate(ids):
            content = self._cuts.get(index)
            if content is None:
                continue
            first, last = (start + offset for offset in encoding.token_to_chars(position))
            # Otherwise the id came from a text that equals the added token only after normalization: not a split point.
            if content in text[first:last]:
                starts.append(first)
                offsets.append(len(kept.ids) + position)
        return Encoded(text, kept.ids + ids, starts, offsets)

    def _encoding(self, text: str) -> Any:
        # Only the library's batch call releases the GIL. It uses other threads, which does not pay for a short text.
        if len(text) <= _SHORT:
            return self._backend.encode(text, add_special_tokens=False)
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=False)
        return encoding


class RecentOpenings:
    """Encodings of the latest first prompts of a tokenizer, up to a total size. Shared by threads.

    Every rollout of a group starts with the same prompt, whose encoding takes about 2 ms per 1,000 tokens.
    """

    def __init__(self) -> None:
        self._known: dict[str, Encoded] = {}  # least recently used first
        self._latest = Encoded()
        self._size = 0
        self._lock = Lock()

    def closest(self, text: str) -> Encoded:
        """Return the encoding of this text if it is known, otherwise the latest one, which may begin with the same text."""
        return self._known.get(text, self._latest)

    def add(self, encoded: Encoded) -> None:
        """Keep an encoding, and drop the ones used longest ago that are over the size."""
        if len(encoded.text) > _OPENING_CHARACTERS // 2:
            return
        with self._lock:
            known = self._known.pop(encoded.text, None)
            self._known[encoded.text] = self._latest = encoded
            self._size += 0 if known is not None else len(encoded.text)
            while self._size > _OPENING_CHARACTERS:
                oldest = next(iter(self._known))
                del self._known[oldest]
                self._size -= len(oldest)


def composes(encoder: GrowingEncoder, sample: str, encode: Callable[[str], Tokens]) -> bool:
    """Return whether encoding by parts gives the tokenizer's own result at every added token of `sample`.

    A tokenizer with an unusual pre-tokenizer or post-processor may break the rule of this module, so the rule is tested on
    load.
    """
    whole = encoder.whole(sample)
    if whole.ids != encode(sample):
        return False
    ends = {*whole.starts, *(start + 1 for start in whole.starts), len(sample) // 2, len(sample)}
    return all(encoder.grown(encoder.whole(sample[:end]), sample).ids == whole.ids for end in ends)


def common_prefix(a: str, b: str) -> int:
    """Return the number of leading characters that both texts share."""
    if b.startswith(a):
        return len(a)
    return first_difference(a, b)

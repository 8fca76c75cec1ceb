"""Measures how much of a text fits into a number of tokens of a rollout's tokenizer."""

from __future__ import annotations

from collections.abc import Callable

from rollout_server.core.spec import TokenizerName
from rollout_server.edge.tokens.cache import Tokenizers
from rollout_server.runtime.errors import RolloutFailed

_TRIES = 12
_FIRST_CHARACTERS = 8
"""Characters per token of the first window that is encoded. If it has too few tokens, a longer one is encoded."""


class TokenizerTokenCounter:
    """Counts with the tokenizers of this server, in their threads."""

    def __init__(self, tokenizers: Tokenizers) -> None:
        self._tokenizers = tokenizers

    async def fitting(self, name: TokenizerName, text: str, tokens: int) -> int | None:
        """Return how many characters of the text have at most `tokens` tokens; None if the tokenizer is not available."""
        try:
            loaded = await self._tokenizers.load(name)
            return await loaded.run(fitting, lambda part: len(loaded.encode(part)), text, tokens)
        except RolloutFailed:
            return None


def fitting(count: Callable[[str], int], text: str, tokens: int) -> int:
    """Return the length of a prefix with at most `tokens` tokens by `count`, and at most about 1 % fewer.

    Interpolates between a prefix that fits and one that does not; every third step bisects, in case tokens are unevenly
    distributed.
    """
    low, low_count = 0, 0
    high = min(len(text), _FIRST_CHARACTERS * tokens)
    while (high_count := count(text[:high])) <= tokens:
        if high == len(text):
            return high
        low, low_count = high, high_count
        high = min(len(text), 2 * high)
    for attempt in range(_TRIES):
        if high - low <= 1 or tokens - low_count <= tokens // 100:
            break
        share = (tokens - low_count) / (high_count - low_count) if attempt % 3 != 2 else 0.5
        middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        found = count(text[:middle])
        if found <= tokens:
            low, low_count = middle, found
        else:
            high, high_count = middle, found
    return low

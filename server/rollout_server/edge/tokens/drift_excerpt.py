"""Decoded text around the first token at which a reported prompt differs from the expected one."""

from __future__ import annotations

from rollout_server.core.ledger import LedgerView, Prediction, Tokens
from rollout_server.core.segment import first_difference
from rollout_server.edge.tokens.tokenizer import LoadedTokenizer

_BEFORE, _AFTER = 8, 16
_LONGEST = 200


async def drift_excerpt(
    loaded: LoadedTokenizer, ledger: LedgerView, predicted: Prediction, reported: Tokens | None
) -> tuple[str, str]:
    """Return the text around the first differing token: (expected, reported).

    Both are empty if the prompts are equal or if `reported` is None. Each excerpt covers 8 tokens before the difference and 16
    from it on, and is cut to 200 characters.
    """
    if reported is None:
        return "", ""
    expected = ledger.prefix() + predicted.closing + predicted.environment
    return ("", "") if reported == expected else await loaded.run(_texts, loaded, expected, reported)


def _texts(loaded: LoadedTokenizer, expected: Tokens, reported: Tokens) -> tuple[str, str]:
    index = first_difference(expected, reported)
    return _decoded(loaded, expected, index), _decoded(loaded, reported, index)


def _decoded(loaded: LoadedTokenizer, ids: Tokens, index: int) -> str:
    text = loaded.decode(ids[max(0, index - _BEFORE) : index + _AFTER])
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"

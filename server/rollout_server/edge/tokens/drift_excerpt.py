"""Where a prompt that a trainer reports differs from the one that was expected, as text that a person can compare."""

from __future__ import annotations

from rollout_server.core.ledger import LedgerView, Prediction, Tokens
from rollout_server.core.segment import first_difference
from rollout_server.edge.tokens.tokenizer import LoadedTokenizer

_BEFORE, _AFTER = 8, 16
_LONGEST = 200


async def drift_excerpt(
    loaded: LoadedTokenizer, ledger: LedgerView, predicted: Prediction, reported: Tokens | None
) -> tuple[str, str]:
    """Text around the first token that differs, expected and reported; both empty where none does, or no prompt is reported."""
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

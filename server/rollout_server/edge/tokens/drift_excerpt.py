"""Where a prompt that a trainer reports parts from the one that was expected, as text that a person can compare."""

from __future__ import annotations

from rollout_server.core.ledger import Prediction, Tokens, pack_tokens
from rollout_server.core.segment import first_difference
from rollout_server.edge.tokens.tokenizer import LoadedTokenizer

_BEFORE, _AFTER = 8, 16
_LONGEST = 200


class DriftExcerpt:
    """Follows one rollout: what the trainer held after its last answer, and what was expected to follow."""

    def __init__(self, loaded: LoadedTokenizer) -> None:
        self._loaded = loaded
        self._held = pack_tokens()

    async def around(self, predicted: Prediction, reported: Tokens | None, answer: Tokens) -> tuple[str, str]:
        """Text around the first token that differs, expected and reported; both empty where none does.

        To be called once for each turn, with the tokens that answered the prompt; None for a prompt that is not reported.
        """
        expected = self._held + predicted.closing + predicted.environment
        self._held = (expected if reported is None else reported) + answer
        if reported is None or reported == expected:
            return "", ""
        return await self._loaded.run(self._texts, expected, reported)

    def _texts(self, expected: Tokens, reported: Tokens) -> tuple[str, str]:
        index = first_difference(expected, reported)
        return self._decoded(expected, index), self._decoded(reported, index)

    def _decoded(self, ids: Tokens, index: int) -> str:
        text = self._loaded.decode(ids[max(0, index - _BEFORE) : index + _AFTER])
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"

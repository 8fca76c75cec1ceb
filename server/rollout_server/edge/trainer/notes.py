"""What is remarkable about an answer, as (code, text)."""

from __future__ import annotations

from collections.abc import Iterator

from rollout_server.core.ledger import Logprobs, Tokens
from rollout_server.core.spec import Sampling


def notes_on(
    token_ids: Tokens | None, logprobs: Logprobs | None, sampling: Sampling, turn: int
) -> Iterator[tuple[str, str]]:
    """Logprobs that are missing, and answers longer than asked."""
    if token_ids is None:
        return
    length, asked = len(token_ids), sampling.max_tokens
    if logprobs is None and sampling.logprobs is not False:
        text = f"turn {turn}: the trainer sent no logprobs, or not a finite one for each of its {length} tokens"
        yield "logprobs_missing", text
    if asked is not None and length > asked:
        text = f"turn {turn}: the answer has {length} tokens, {asked} were asked for; it is kept whole"
        yield "length_exceeded", text

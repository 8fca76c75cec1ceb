"""Testing tools that ship with the server: a strict trainer, scripted models, a toy tokenizer.

`StrictTrainer` is an independent judge. Nothing that it is made of imports anything of the server, so that a mistake in
how the server counts tokens cannot be made twice.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

__all__ = ["TrainerDialect"]


class TrainerDialect(StrEnum):
    """Which of the two HTTP dialects a trainer expects of the calls for completions (docs/design.md, A and B).

    They look alike but for `response_mask`. A trainer that expects a mask refuses a call without one, so one that speaks
    both has to know which is meant: the first call of a rollout says so, by having the key (null there) or not.
    """

    MASKED = "masked"
    """The synchronous dialect. Every call is judged by its mask, and outcomes are not received."""
    PLAIN = "plain"
    """The asynchronous dialect. No call has a mask, every one has an ``Idempotency-Key``, and outcomes are received."""
    EITHER = "either"
    """Each rollout in the dialect that its first call is in."""

    def has_mask(self, body: Mapping[str, Any], known: bool | None) -> bool:
        """Whether a call is one with a mask; `known` says it of the calls before, None where there were none."""
        if self is not TrainerDialect.EITHER:
            return self is TrainerDialect.MASKED
        return known if known is not None else "response_mask" in body

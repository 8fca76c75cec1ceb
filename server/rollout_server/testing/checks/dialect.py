"""Which of the two HTTP dialects a trainer speaks (http-wire.md, A and B)."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class TrainerDialect(StrEnum):
    """What a trainer expects of the calls for completions.

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

"""Testing tools that ship with the server: the strict trainer, scripted models and a toy tokenizer.

`StrictTrainer` verifies every token and mask independently. This package imports no code of the server, because shared code would
hide the same counting bug on both sides (D20).
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

__all__ = ["TrainerDialect"]


class TrainerDialect(StrEnum):
    """Which HTTP trainer protocol the strict trainer expects in completion requests (docs/design.md, protocols A and B).

    The two differ in `response_mask`. A trainer that expects a mask refuses a request without one. A trainer that accepts both
    protocols therefore checks the first request of each rollout: it has the key `response_mask` (with value null) or not.
    """

    MASKED = "masked"
    """The synchronous HTTP API. Every request must have a correct mask; the trainer receives no outcomes."""
    PLAIN = "plain"
    """The asynchronous HTTP API. No request has a mask, each has an ``Idempotency-Key``, and the trainer receives outcomes."""
    EITHER = "either"
    """Each rollout uses the protocol of its first request."""

    def has_mask(self, body: Mapping[str, Any], known: bool | None) -> bool:
        """Return whether a request must have a mask. `known`: whether the rollout's earlier requests did; None: there are none."""
        if self is not TrainerDialect.EITHER:
            return self is TrainerDialect.MASKED
        return known if known is not None else "response_mask" in body

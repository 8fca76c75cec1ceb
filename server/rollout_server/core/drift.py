"""Drift: the prompt that a trainer reports is not what was expected (the theory is in `core.ledger`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class DriftKind(Enum):
    """What parted between the prompt a trainer reports and ledger + what was appended."""

    HISTORY_REWRITTEN = "history_rewritten"
    RETOKENISED = "retokenised"
    ENVIRONMENT = "environment"
    TRUNCATED = "truncated"
    PROMPT = "prompt"


@dataclass(frozen=True, slots=True)
class Drift:
    """The prompt that a trainer reported is not ledger + what was appended.

    `index` is the first token that differs, counted from the start of the prompt; the lengths are in tokens.
    """

    kind: DriftKind
    index: int
    expected: int
    reported: int

    @property
    def opens_segment(self) -> bool:
        """The prompt does not extend the segment."""
        return self.kind not in (DriftKind.ENVIRONMENT, DriftKind.PROMPT)

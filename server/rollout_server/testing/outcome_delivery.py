"""The outcome of one rollout, from its first delivery on: it comes until it is settled, the same bytes under the same key."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rollout_server.testing.checks.verdict import DeliveredOutcome

ASKED_AGAIN: Final = frozenset({408, 425, 429})
"""The statuses 4xx after which the same outcome comes again; after any other it does not (http-wire.md, B)."""


@dataclass(frozen=True, slots=True)
class OutcomeNotice:
    """The delivery of an outcome: the bytes of its body, the body parsed, its ``Idempotency-Key``; empty without one."""

    rollout_id: str
    raw: bytes
    body: Mapping[str, Any]
    key: str


class OutcomeDelivery:
    """What was delivered first, how often it came, and what settled it."""

    def __init__(self, first: OutcomeNotice) -> None:
        self._first = first
        self._deliveries = 0
        self._answered: int | None = None

    @property
    def settled(self) -> bool:
        """Whether it was acknowledged or refused for good."""
        return self._answered is not None

    def come(self, notice: OutcomeNotice) -> str | None:
        """Counts a delivery. What is wrong with it in the light of the first one; None if nothing is."""
        self._deliveries += 1
        if self._answered is not None:
            return f"the outcome was answered with status {self._answered}, which is final, and it came again"
        if notice.raw != self._first.raw:
            return "the body differs from the one delivered before: a rollout has one outcome, repeated byte for byte"
        if notice.key != self._first.key:
            return f"the Idempotency-Key is {notice.key!r}, before it was {self._first.key!r}"
        return None

    def settle(self, status: int) -> None:
        """Takes note of the status that was sent. The first final one counts."""
        final = 200 <= status < 300 or (400 <= status < 500 and status not in ASKED_AGAIN)
        if final and self._answered is None:
            self._answered = status

    def value(self) -> DeliveredOutcome:
        """All of it as a value."""
        return DeliveredOutcome(self._first.body, self._first.key, self._deliveries, self._answered)

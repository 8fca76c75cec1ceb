"""State of an outcome's delivery, and results of single attempts."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from rollout_server.core.spec import Target


class DeliveryState(Enum):
    """State of an outcome's delivery."""

    PENDING = "pending"
    ACKNOWLEDGED = "acknowledged"
    REFUSED = "refused"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Delivery:
    """The delivery of one outcome. `error` describes the last attempt; times are in seconds since 1970."""

    state: DeliveryState = DeliveryState.PENDING
    attempts: int = 0
    error: str = ""
    next_attempt: float | None = None
    ended: float | None = None


@dataclass(frozen=True, slots=True)
class DeliveryAcknowledged:
    """The receiver has the outcome."""


@dataclass(frozen=True, slots=True)
class DeliveryRefused:
    """The receiver rejected the outcome permanently. `text` is a message for a person."""

    text: str


@dataclass(frozen=True, slots=True)
class DeliveryUnsettled:
    """The outcome did not arrive, or its arrival is unknown. It must be sent again.

    `retry_after` is the delay in seconds that the receiver requested, or None.
    """

    text: str
    retry_after: float | None = None


Receipt: TypeAlias = "DeliveryAcknowledged | DeliveryRefused | DeliveryUnsettled"


@dataclass(frozen=True, slots=True)
class PackedOutcome:
    """A serialized outcome. Each attempt sends the same `body` under the same idempotency `key`.

    `credential` is a bearer token, or empty.
    """

    target: Target
    key: str
    body: bytes = field(repr=False)
    credential: str = field(default="", repr=False)

"""How far the delivery of an outcome is, and what one attempt came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from rollout_server.core.spec import Target


class DeliveryState(Enum):
    """How far the delivery of an outcome is."""

    PENDING = "pending"
    ACKNOWLEDGED = "acknowledged"
    REFUSED = "refused"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Delivery:
    """The delivery of one outcome. `error` tells of the last attempt; times are in seconds since 1970."""

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
    """The receiver refuses the outcome for good. `text` is for a person."""

    text: str


@dataclass(frozen=True, slots=True)
class DeliveryUnsettled:
    """Nobody knows whether the outcome arrived, or it did not: it is to be sent again.

    `retry_after` is in seconds, where the receiver says when to try again.
    """

    text: str
    retry_after: float | None = None


Receipt: TypeAlias = "DeliveryAcknowledged | DeliveryRefused | DeliveryUnsettled"


@dataclass(frozen=True, slots=True)
class PackedOutcome:
    """An outcome on its way: the same `body` under the same `key` on each attempt. `credential` is a bearer token, or empty."""

    target: Target
    key: str
    body: bytes = field(repr=False)
    credential: str = field(default="", repr=False)

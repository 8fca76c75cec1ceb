"""Receivers of outcomes: a scripted reporter, and an observer that records every attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rollout_server.core.spec import Dialect, Target
from rollout_server.runtime.log import Entry
from rollout_server.runtime.outcome_delivery import DeliveryAcknowledged, DeliveryUnsettled, PackedOutcome, Receipt
from rollout_server.runtime.ports import Credentials
from rollout_server.runtime.registry.dependencies import Attempt
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.start_request import StartRequest

from tests.support.runtime_harness import RuntimeHarness, Say, Script, a_spec, wait

RECEIVER = Target("http://receiver:9001", Dialect.HTTP_PLAIN)
YES = DeliveryAcknowledged()
DOWN = DeliveryUnsettled("nobody there")


class Receiver:
    """Return the k-th receipt for the k-th attempt, `seconds` later; the last one repeats. Exceptions are raised.

    Each packing gives other bytes, so packing an outcome twice becomes visible.
    """

    def __init__(self, *receipts: Receipt | Exception, seconds: float = 0.0) -> None:
        self.receipts = receipts or (YES,)
        self.seconds = seconds
        self.parcels: list[PackedOutcome] = []
        self.times: list[float] = []
        self.packed = 0
        self.unpackable: Exception | None = None

    def pack(self, rollout: Rollout, target: Target, key: str) -> bytes:
        self.packed += 1
        if self.unpackable is not None:
            raise self.unpackable
        assert rollout.outcome is not None
        return f"{rollout.uid} {key} {rollout.outcome.end} {self.packed}".encode()

    async def deliver(self, parcel: PackedOutcome) -> Receipt:
        self.parcels.append(parcel)
        self.times.append(asyncio.get_running_loop().time())
        await wait(self.seconds)
        receipt = self.receipts[min(len(self.parcels), len(self.receipts)) - 1]
        if isinstance(receipt, Exception):
            raise receipt
        return receipt

    @property
    def credentials(self) -> list[str]:
        """The credential of each attempt."""
        return [parcel.credential for parcel in self.parcels]

    @property
    def waits(self) -> list[float]:
        """Seconds between the starts of the attempts."""
        return [round(late - early, 6) for early, late in zip(self.times, self.times[1:], strict=False)]


class Noting:
    """An observer that records delivery attempts."""

    def __init__(self) -> None:
        self.attempts: list[tuple[str, Attempt, float]] = []

    def recorded(self, rollout: Rollout, entries: Sequence[Entry]) -> None:
        """Ignore the records of rollouts."""

    def delivered(self, rollout: Rollout, attempt: Attempt, milliseconds: float) -> None:
        self.attempts.append((rollout.uid, attempt, round(milliseconds, 3)))


def owing(world: RuntimeHarness, request_id: str = "", *, key: str = "", **fields: object) -> StartRequest:
    """A start request whose outcome is delivered to `RECEIVER`, with the credential `key`."""
    spec = a_spec(**{"outcome": RECEIVER, **fields})
    world.scripts.setdefault(spec.rollout_id, Script(Say("8")))
    return StartRequest(spec, "me", request_id, credentials=Credentials(outcome=key))


async def until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds, once per second of the loop's time."""
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(1)
    raise AssertionError("the condition never held")

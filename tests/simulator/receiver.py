"""The receiver of outcomes, which outlives the server and judges what it gets."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rollout_server.core.spec import Target
from rollout_server.runtime.outcome_delivery import (
    DeliveryAcknowledged,
    DeliveryRefused,
    DeliveryUnsettled,
    PackedOutcome,
    Receipt,
)
from rollout_server.runtime.rollout import Rollout

from tests.simulator.faults import Fault
from tests.simulator.laws import Laws

if TYPE_CHECKING:
    from tests.simulator.world import Life, World


class FakeReceiver:
    """The receiver of a world. `bodies` has the bytes by key, `acknowledged` the rollouts acknowledged by callers' requests."""

    def __init__(self, world: World) -> None:
        self.bodies: dict[str, bytes] = {}
        self.acknowledged: set[str] = set()
        self.world = world
        self.packed = 0

    def receive(self, packed: PackedOutcome) -> Receipt:
        """Receive an outcome. It may be one that was received before."""
        laws, uid = self.world.laws, packed.key.removesuffix("/outcome")
        self.world.note(f"deliver {packed.key}")
        self._check_stored(laws, uid, packed)
        before = self.bodies.setdefault(packed.key, packed.body)
        laws.require(before == packed.body, f"{packed.key}: other bytes under the same key")
        laws.require(uid not in self.acknowledged, f"{packed.key}: sent after a caller had acknowledged it")
        if self.world.faults.happens(Fault.RECEIVER_ACK_LOST):
            return DeliveryUnsettled("the connection broke")
        return DeliveryAcknowledged()

    def _check_stored(self, laws: Laws, uid: str, packed: PackedOutcome) -> None:
        stored = self.world.disk.rollouts.get(uid)
        laws.require(stored is not None and stored.ended, f"{packed.key}: sent before the outcome was committed")
        if stored is None:
            return
        laws.require(not stored.acknowledged, f"{packed.key}: sent after its acknowledgement was stored")
        held = stored.delivery is not None and stored.delivery.body == packed.body
        laws.require(held, f"{packed.key}: sent before its bytes were committed")


class FakeReporter:
    """The connection of one process to the receiver.

    Attributes:
        refused: the keys whose refusal it returned, and that no caller wants to be sent again.
    """

    def __init__(self, receiver: FakeReceiver, life: Life) -> None:
        self._receiver = receiver
        self._life = life
        self._acknowledged: set[str] = set()
        self.refused: set[str] = set()

    def pack(self, rollout: Rollout, target: Target, key: str) -> bytes:
        """Return bytes that differ each time, so that packing an outcome twice becomes visible."""
        self._receiver.packed += 1
        return f"{self._receiver.packed} {key} {rollout.outcome and rollout.outcome.end}".encode()

    async def deliver(self, packed: PackedOutcome) -> Receipt:
        """Make one attempt."""
        world = self._life.world
        faults, draw = world.faults, world.draw
        settled = packed.key in self._acknowledged | self.refused
        world.laws.require(not settled, f"{packed.key}: sent after it was acknowledged or refused")
        await asyncio.sleep(draw.uniform(0, 0.3))
        if faults.happens(Fault.RECEIVER_DOWN):
            return DeliveryUnsettled("nobody there", draw.choice((None, 5.0)))
        if faults.happens(Fault.RECEIVER_BUG, 0.4):
            raise LookupError("a bug of the reporter")
        if faults.happens(Fault.RECEIVER_REFUSES, 0.5):
            self.refused.add(packed.key)
            return DeliveryRefused("no such rollout")
        if faults.happens(Fault.RECEIVER_HANGS, 0.5):
            await asyncio.sleep(30)
            return DeliveryUnsettled("no response")
        receipt = self._receiver.receive(packed)
        await asyncio.sleep(draw.uniform(0, 0.3))
        if isinstance(receipt, DeliveryAcknowledged):
            self._acknowledged.add(packed.key)
        return receipt

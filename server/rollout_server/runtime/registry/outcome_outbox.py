"""The outbox: outcomes that have to be delivered, each until it is acknowledged or expires (D7).

An outcome is decided once and serialized once. Every attempt sends the same bytes under the same idempotency key, also after a
restart of a server with a durable journal, so a receiver that remembers keys processes it once. Nothing is sent after a recorded
acknowledgement, whether it came from the receiver or from an AcknowledgeOutcome call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from rollout_server.core.spec import Target
from rollout_server.runtime.journal import DeliveryChanged, StoredDelivery
from rollout_server.runtime.outcome_delivery import (
    Delivery,
    DeliveryAcknowledged,
    DeliveryRefused,
    DeliveryState,
    DeliveryUnsettled,
    PackedOutcome,
    Receipt,
)
from rollout_server.runtime.registry.dependencies import Attempt, RegistryDependencies
from rollout_server.runtime.rollout import Rollout

_log = logging.getLogger(__name__)
_CANCEL_SECONDS = 1.0
"""How long a cancelled attempt may take to end."""
_ATTEMPTS = {
    DeliveryAcknowledged: Attempt.ACKNOWLEDGED,
    DeliveryRefused: Attempt.REFUSED,
    DeliveryUnsettled: Attempt.FAILED,
}


class Outbox:
    """Deliveries of a server. Lives on one event loop. `settled` is called once for each rollout whose delivery is over."""

    def __init__(self, dependencies: RegistryDependencies, settled: Callable[[Rollout], None]) -> None:
        self._reporter = dependencies.reporter
        self._retry_policy = dependencies.retry_policy
        self._clock = dependencies.clock
        self._observer = dependencies.observer
        self._journal = dependencies.journal
        self._settled = settled
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stored: dict[str, StoredDelivery] = {}

    @property
    def pending(self) -> int:
        """Number of deliveries that are not over."""
        return len(self._tasks)

    def send(self, rollout: Rollout, target: Target) -> None:
        """Start to deliver the outcome of a finished rollout."""
        rollout.update_delivery(Delivery())
        self._start(rollout, target)

    def resume(self, rollout: Rollout, target: Target, stored: StoredDelivery) -> None:
        """Continue the delivery that an earlier process of this server began, unless it is over."""
        rollout.update_delivery(stored.delivery)
        if rollout.owes:
            self._stored[rollout.uid] = stored
            self._start(rollout, target)

    def _start(self, rollout: Rollout, target: Target) -> None:
        task = asyncio.create_task(self._deliver(rollout, target), name=f"deliver {rollout.uid}")
        self._tasks[rollout.uid] = task
        task.add_done_callback(lambda done: self._over(done, rollout))

    def holds(self, rollout: Rollout) -> bool:
        """Return whether the rollout's delivery is running or still has to happen."""
        return rollout.owes or rollout.uid in self._tasks

    def acknowledge(self, rollout: Rollout) -> None:
        """Stop the delivery: the outcome was received in another way.

        The state changes before the task is cancelled. If an attempt returns in the same round of the event loop, it finds the
        delivery acknowledged and sends nothing more.
        """
        if rollout.owes:
            self._end(rollout, DeliveryState.ACKNOWLEDGED, "")
            task = self._tasks.get(rollout.uid)
            if task is not None:
                task.cancel()
            else:  # `drain` stopped the delivery
                self._stored.pop(rollout.uid, None)
                self._settled(rollout)

    async def drain(self, grace: float) -> None:
        """Continue deliveries for `grace` seconds, then cancel them.

        Without a durable journal, outcomes that are not delivered by then are lost with this process. The log names them.
        """
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=grace)
        left = list(self._tasks.items())
        if left:
            uids = ", ".join(uid for uid, _ in left[:20])
            if self._journal.is_durable:
                _log.info("%d outcomes will be sent again after the next start: %s", len(left), uids)
            else:
                _log.error("%d outcomes were not delivered before the shutdown: %s", len(left), uids)
            for _, task in left:
                task.cancel()
            await asyncio.wait([task for _, task in left], timeout=_CANCEL_SECONDS)

    async def _deliver(self, rollout: Rollout, target: Target) -> None:
        stored = self._stored.get(rollout.uid) or self._pack(rollout, target)
        attempts = stored.delivery.attempts
        if attempts:
            await asyncio.sleep((stored.delivery.next_attempt or 0.0) - self._clock.wall())
        # The bytes are stored before they are sent for the first time, so that every attempt sends the same.
        await self._journal.flush()
        packed = PackedOutcome(target, stored.key, stored.body or b"")
        expires = stored.expires - self._clock.wall() + self._clock.monotonic()
        policy = self._retry_policy
        while True:
            attempts += 1
            receipt = await self._attempt(rollout, packed, attempts)
            if not rollout.owes:
                return None  # acknowledged in another way during the attempt
            if isinstance(receipt, DeliveryAcknowledged):
                return self._end(rollout, DeliveryState.ACKNOWLEDGED, "")
            if isinstance(receipt, DeliveryRefused):
                return self._end(rollout, DeliveryState.REFUSED, receipt.text)
            pause = max(policy.backoff(attempts), receipt.retry_after or 0.0)
            exhausted = policy.retries is not None and attempts > policy.retries
            if exhausted or self._clock.monotonic() + pause >= expires:
                return self._end(rollout, DeliveryState.EXPIRED, receipt.text)
            next_attempt = self._clock.wall() + pause
            self._update(rollout, Delivery(attempts=attempts, error=receipt.text, next_attempt=next_attempt))
            await asyncio.sleep(pause)

    def _pack(self, rollout: Rollout, target: Target) -> StoredDelivery:
        key = f"{rollout.uid}/outcome"
        body = self._reporter.pack(rollout, target, key)
        expires = self._clock.wall() + self._retry_policy.expiry
        stored = self._stored[rollout.uid] = StoredDelivery(rollout.delivery or Delivery(), key, expires, body)
        self._journal.write(DeliveryChanged(rollout.uid, stored))
        return stored

    async def _attempt(self, rollout: Rollout, packed: PackedOutcome, number: int) -> Receipt:
        rollout.update_delivery(replace(rollout.delivery or Delivery(), attempts=number, next_attempt=None))
        began = self._clock.monotonic()
        # Read the credential for each attempt: a repeated start request may bring a new one.
        receipt = await self._reporter.deliver(replace(packed, credential=rollout.credentials.outcome))
        self._observer.delivered(rollout, _ATTEMPTS[type(receipt)], 1000 * (self._clock.monotonic() - began))
        return receipt

    def _end(self, rollout: Rollout, state: DeliveryState, error: str) -> None:
        before = rollout.delivery or Delivery()
        self._update(rollout, Delivery(state, before.attempts, error, ended=self._clock.wall()))
        if state is not DeliveryState.ACKNOWLEDGED:
            extra = {"rollout_uid": rollout.uid, "rollout_id": rollout.spec.rollout_id}
            # The receiver's text is only in the delivery state: in the log it could forge lines.
            _log.error("outcome not delivered after %d attempts: %s", before.attempts, state.value, extra=extra)

    def _update(self, rollout: Rollout, delivery: Delivery) -> None:
        """Set the state of a delivery and store it. What was acknowledged is not sent again, so its bytes are deleted."""
        rollout.update_delivery(delivery)
        stored = self._stored.get(rollout.uid)
        if stored is not None:
            body = b"" if delivery.state is DeliveryState.ACKNOWLEDGED else None
            self._journal.write(DeliveryChanged(rollout.uid, replace(stored, delivery=delivery, body=body)))

    def _over(self, task: asyncio.Task[None], rollout: Rollout) -> None:
        del self._tasks[rollout.uid]
        if not task.cancelled() and task.exception() is not None:
            _log.error("delivery of the outcome of rollout %s failed", rollout.uid, exc_info=task.exception())
            if rollout.owes:
                self._end(rollout, DeliveryState.EXPIRED, "internal error of the server; its log has the reason")
        if not rollout.owes:
            self._stored.pop(rollout.uid, None)
            self._settled(rollout)

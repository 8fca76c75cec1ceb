"""The outbox: outcomes that have to be delivered, each until it is acknowledged or expires (D7).

An outcome is decided once and serialized once. Every attempt sends the same bytes under the same idempotency key, also after a
restart of a server with a durable journal, so a receiver that remembers keys processes it once. Nothing is sent after a recorded
acknowledgement, whether it came from the receiver or from an AcknowledgeOutcome call.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from weakref import WeakKeyDictionary

from rollout_server.core.error import Busy
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
        self._tracer = dependencies.tracer
        self._journal = dependencies.journal
        self._settled = settled
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._owed: Counter[str] = Counter()  # deliveries that are not over, by caller
        self._restored: list[Rollout] = []
        self._pauses: dict[str, asyncio.Future[None]] = {}
        # Serialized once, and kept while the outcome may be sent again: until it is acknowledged or its rollout is dropped.
        self._stored: WeakKeyDictionary[Rollout, StoredDelivery] = WeakKeyDictionary()

    @property
    def pending(self) -> int:
        """Number of deliveries that are not over."""
        return len(self._tasks)

    def check(self, caller: str, most: int) -> None:
        """Raise `Busy` if `most` outcomes or more wait for their receivers, and this caller owes its share of them or more.

        All callers that owe outcomes, and this one, have equal shares. So a caller whose receivers are down keeps nobody else from
        starting rollouts.
        """
        if self.pending < most:
            return
        own, share = self._owed[caller], max(most // len({caller, *self._owed}), 1)
        if own >= share:
            text = f"{self.pending} outcomes wait for their receivers, at most {most} may; {own} are yours, your share is {share}"
            raise Busy(f"{text}; ask again later", retry_after=1.0)

    def send(self, rollout: Rollout, target: Target) -> None:
        """Start to deliver the outcome of a finished rollout."""
        rollout.update_delivery(Delivery())
        self._begin(rollout, target)

    def restore(self, rollout: Rollout, stored: StoredDelivery | None) -> None:
        """Take over the delivery that an earlier process began; None: it began none. `resume` continues it."""
        rollout.update_delivery(Delivery() if stored is None else stored.delivery)
        if stored is not None and (rollout.owes or rollout.undelivered):
            self._stored[rollout] = stored
        if rollout.owes:
            self._restored.append(rollout)

    def resume(self) -> None:
        """Continue the deliveries that were taken over and are not over."""
        restored, self._restored = self._restored, []
        for rollout in restored:
            if rollout.owes and rollout.delivery is not None and rollout.spec.outcome is not None:
                self._begin(rollout, rollout.spec.outcome, rollout.delivery.attempts)

    def resend(self, rollout: Rollout) -> bool:
        """Send the outcome again, unless it was acknowledged. Return whether it is sent.

        A delivery that waits for its next attempt makes it now. One that was given up begins again with a new time limit. Bytes
        and key stay the same, and `attempts` continues.
        """
        pause, target = self._pauses.get(rollout.uid), rollout.spec.outcome
        if rollout.owes and pause is not None and not pause.done():
            pause.set_result(None)
        if rollout.undelivered and rollout.delivery is not None and target is not None:
            stored = self._stored.get(rollout)
            if stored is not None:
                self._stored[rollout] = replace(stored, expires=self._clock.wall() + self._retry_policy.expiry)
            self._update(rollout, Delivery(attempts=rollout.delivery.attempts, error=rollout.delivery.error))
            self._begin(rollout, target)
        return rollout.owes

    def _begin(self, rollout: Rollout, target: Target, counted: int = 0) -> None:
        """Begin or continue a delivery. `counted`: attempts of earlier processes that count towards its retries."""
        task = asyncio.create_task(self._deliver(rollout, target, counted), name=f"deliver {rollout.uid}")
        self._owed[rollout.caller] += rollout.uid not in self._tasks
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
                self._settled(rollout)
        elif rollout.undelivered:
            self._end(rollout, DeliveryState.ACKNOWLEDGED, "")
            if not rollout.is_read:
                rollout.drop_credentials()

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

    async def _deliver(self, rollout: Rollout, target: Target, counted: int) -> None:
        stored = self._stored.get(rollout) or self._pack(rollout, target)
        earlier = rollout.delivery.attempts - counted if rollout.delivery is not None else 0
        policy, attempts = self._retry_policy, counted
        # The wall clock may have been set since an earlier process stored these times, so the retry policy bounds them.
        expires = self._clock.monotonic() + min(stored.expires - self._clock.wall(), policy.expiry)
        if rollout.delivery is not None and rollout.delivery.next_attempt is not None:
            pause = min(rollout.delivery.next_attempt - self._clock.wall(), policy.longest)
            await self._pause(rollout, max(pause, 0.0))
        # The bytes are stored before they are sent for the first time, so that every attempt sends the same.
        await self._journal.flush()
        packed = PackedOutcome(target, stored.key, stored.body)
        while True:
            attempts += 1
            receipt = await self._attempt(rollout, packed, earlier + attempts)
            if not rollout.owes:
                return None  # acknowledged in another way during the attempt
            if isinstance(receipt, DeliveryAcknowledged):
                return self._end(rollout, DeliveryState.ACKNOWLEDGED, "")
            if isinstance(receipt, DeliveryRefused):
                return self._end(rollout, DeliveryState.REFUSED, receipt.text)
            pause, left = policy.backoff(attempts), expires - self._clock.monotonic()
            demanded = receipt.retry_after or 0.0
            if demanded < left:  # a longer pause would end the delivery before its time
                pause = max(pause, demanded)
            exhausted = policy.retries is not None and attempts > policy.retries
            if exhausted or pause >= left:
                return self._end(rollout, DeliveryState.EXPIRED, receipt.text)
            next_attempt = self._clock.wall() + pause
            self._update(rollout, Delivery(attempts=earlier + attempts, error=receipt.text, next_attempt=next_attempt))
            await self._pause(rollout, pause)

    def _pack(self, rollout: Rollout, target: Target) -> StoredDelivery:
        key = f"{rollout.uid}/outcome"
        body = self._reporter.pack(rollout, target, key)
        expires = self._clock.wall() + self._retry_policy.expiry
        stored = self._stored[rollout] = StoredDelivery(rollout.delivery or Delivery(), key, expires, body)
        self._journal.write(DeliveryChanged(rollout.uid, stored))
        return stored

    async def _pause(self, rollout: Rollout, seconds: float) -> None:
        """Wait until the next attempt is due, or until `resend` asks for it."""
        pause = self._pauses[rollout.uid] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait([pause], timeout=seconds)
        finally:
            del self._pauses[rollout.uid]

    async def _attempt(self, rollout: Rollout, packed: PackedOutcome, number: int) -> Receipt:
        rollout.update_delivery(replace(rollout.delivery or Delivery(), attempts=number, next_attempt=None))
        began = self._clock.monotonic()
        # Read the credential for each attempt: a repeated start request may bring a new one.
        with self._tracer.delivery(rollout, packed.target, number) as report:
            receipt = await self._reporter.deliver(replace(packed, credential=rollout.credentials.outcome))
            report(receipt)
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
        """Set the state of a delivery and store it."""
        rollout.update_delivery(delivery)
        stored = self._stored.get(rollout)
        if stored is not None:
            self._journal.write(DeliveryChanged(rollout.uid, replace(stored, delivery=delivery)))
        if delivery.state is DeliveryState.ACKNOWLEDGED:
            self._stored.pop(rollout, None)

    def _over(self, task: asyncio.Task[None], rollout: Rollout) -> None:
        if self._tasks.get(rollout.uid) is not task:
            return  # `resend` began the delivery again before this task was done
        del self._tasks[rollout.uid]
        self._owed[rollout.caller] -= 1
        if not self._owed[rollout.caller]:
            del self._owed[rollout.caller]
        if not task.cancelled() and task.exception() is not None:
            _log.error("delivery of the outcome of rollout %s failed", rollout.uid, exc_info=task.exception())
            if rollout.owes:
                self._end(rollout, DeliveryState.EXPIRED, "internal error of the server; its log has the reason")
        if not rollout.owes:
            self._settled(rollout)

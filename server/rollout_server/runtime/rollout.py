"""A rollout of this server: its state machine, log and attached clients."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import Protocol

from rollout_server.core.capture.unreceived import UNSEEN, unreceived
from rollout_server.core.machine import Machine, replay
from rollout_server.core.outcome import Cancellation, Category, End, Failure, Outcome, RewardRule
from rollout_server.core.record import RESAMPLED, Accepted, Answered, Ended, Input, Masked, Note, Record
from rollout_server.core.segment import Segment
from rollout_server.core.staleness import cancel_reason
from rollout_server.runtime.activity import RolloutActivity
from rollout_server.runtime.agent_protocol import goes_on_live
from rollout_server.runtime.capture.endpoint import CaptureSlot
from rollout_server.runtime.journal import (
    AcceptedStart,
    CredentialsChanged,
    EntriesAppended,
    Journal,
    OutcomeReceived,
    RolloutAccepted,
    StoredRollout,
)
from rollout_server.runtime.log import Entry, Log, running_seconds
from rollout_server.runtime.outcome_delivery import Delivery, DeliveryState
from rollout_server.runtime.policy import AnnouncedPolicy, SamplingGate
from rollout_server.runtime.ports import Clock, Credentials, Tool
from rollout_server.runtime.replay import AgentReplay
from rollout_server.runtime.run.ending import RolloutEnding
from rollout_server.runtime.start_request import AdmittedStart


class RolloutOwner(Protocol):
    """The object that keeps rollouts, in practice the registry. `journal` stores them."""

    journal: Journal

    def on_recorded(self, rollout: Rollout, entries: Sequence[Entry]) -> None:
        """Called for new entries right after they were added to a rollout's log."""

    def on_published(self, rollout: Rollout, entries: Sequence[Entry]) -> None:
        """Called for entries right after they were published."""

    def on_released(self, rollout: Rollout) -> None:
        """Called when the rollout's hold is released."""


class GroupMembership(Protocol):
    """The group that a rollout was started with."""

    @property
    def rewarding(self) -> bool:
        """Whether the reward of the group is being computed. It may read a rollout that is cancelled meanwhile."""

    def wait(self, rollout: Rollout, run: object, ended: Ended) -> bool:
        """Keep back the end of a rollout until its group has a reward. Return False if the end needs no group reward."""

    def next_end(self, now: float) -> float:
        """Return the time of the next end in the group, in seconds since 1970: `now`, or later if the clock has not moved on."""

    def on_recorded(self, rollout: Rollout, end: End) -> None:
        """Called when the end of the rollout is recorded. What the group writes in this call shares a commit with the end."""

    def on_ended(self, rollout: Rollout) -> None:
        """Called when the rollout has its outcome."""

    def on_dropped(self) -> None:
        """Called when the registry has dropped one of the rollouts."""


class RolloutState(Enum):
    """State of a rollout, as its caller sees it."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"


class Rollout:
    """One rollout. Lives on one event loop.

    Only its own methods change it. Everything that happens during the run goes through `record`, which then notifies the owner.
    What is recorded takes effect in the rollout at once; the outside sees it once the journal has stored it.

    Args:
        stored: what the journal has of it, after a restart of the server. None: it was accepted now.

    Attributes:
        fingerprint: see `AcceptedStart`.
        trace: that of the call that started it.
        had_to_wait: whether it found no free slot when it was accepted, or was accepted by an earlier process.
        replay: the replay of a log that an earlier process has stored, until it is used up. The log has all of it from the start.
    """

    def __init__(
        self,
        uid: str,
        admitted: AdmittedStart,
        tools: Sequence[Tool],
        clock: Clock,
        owner: RolloutOwner,
        stored: StoredRollout | None = None,
    ) -> None:
        request, agent = admitted.request, admitted.agent
        self.uid = uid
        self.spec, self._attached_bytes = request.spec, request.spec.attached_bytes
        self.request_id, self.fingerprint = request.request_id, admitted.fingerprint
        self.caller = request.caller
        self.trace, self.had_to_wait = request.trace, stored is not None
        self.agent = agent
        self.tools = tools
        self.clock = clock
        self.machine = Machine(uid, self.spec.messages, self.spec.limits, self.spec.staleness)
        self.ending = RolloutEnding()
        self.activity = RolloutActivity()
        self.gate = SamplingGate()
        self.capture = CaptureSlot(self.ending.requested, self.ending.reached)
        self.group: GroupMembership | None = None
        self.replay: AgentReplay | None = None
        self.log = Log(stored.entries if stored is not None else ())
        self.created = stored.start.created if stored is not None else clock.wall()
        self._credentials = request.credentials
        self._delivery: Delivery | None = None
        self._running = self._received = False
        self._restored = stored is not None
        self._suspended = False
        self._holders: set[object] = set()
        self._finished: float | None = None
        self._deadline: float | None = None
        self._owner = owner
        self._queued_at = clock.monotonic()
        # Times in the log go on from here with the monotonic clock: a step of the wall clock is no running time, and they never
        # decrease.
        self._to_wall = max([clock.wall(), *(entry.time for entry in self.log.entries[-1:])]) - self._queued_at
        self._queued_before, self._earlier_seconds = max(0.0, clock.wall() - self.created), 0.0
        self._noted = Counter[Note]()
        self._attached = 0
        self._detach_timer: asyncio.TimerHandle | None = None
        if stored is not None:
            self._restore(stored)
        else:
            start = AcceptedStart(uid, request, admitted.fingerprint, agent.version, self.created)
            owner.journal.write(RolloutAccepted(start))
            self.record(Accepted(len(request.spec.messages), agent.name, agent.version))
            self._start_detach_timer()

    @property
    def state(self) -> RolloutState:
        """Queued, running or finished."""
        if self.outcome is not None:
            return RolloutState.FINISHED
        # A rollout that waits for its group has left its slot.
        began = self._running or self.ending.decided is not None
        return RolloutState.RUNNING if began else RolloutState.QUEUED

    @property
    def outcome(self) -> Outcome | None:
        """The outcome; None until the end of the rollout is published."""
        return self.machine.outcome if self.log.is_over else None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of its ledger so far. Those of an earlier process count while its log is replayed."""
        if self.replay is None:
            return self.machine.ledger.segments
        if self.replay.segments is None:  # nothing is added to them until the replay is over
            fresh = Machine(self.uid, self.spec.messages, self.spec.limits, self.spec.staleness)
            self.replay.segments = replay(fresh, self.log.records).ledger.segments
        return self.replay.segments

    @property
    def reward_rule(self) -> RewardRule:
        """How its rewards reach its samples, as its agent declares."""
        return RewardRule(self.agent.reward_rule)

    @property
    def running(self) -> bool:
        """Whether it occupies a slot. It may keep the slot for a moment after its end."""
        return self._running

    @property
    def deadline(self) -> float | None:
        """End of its time limit on the monotonic clock; None: no limit, or not running yet."""
        return self._deadline

    @property
    def finished(self) -> float | None:
        """When it ended, in seconds since 1970; None until its end is published."""
        return self._finished if self.log.is_over else None

    @property
    def credentials(self) -> Credentials:
        """Bearer tokens for its endpoints; empty once no endpoint will be called any more."""
        return self._credentials

    @property
    def size(self) -> int:
        """Approximate memory in bytes: what grows in `machine`, and the metadata of the request."""
        return self.machine.size + self._attached_bytes

    @property
    def delivery(self) -> Delivery | None:
        """State of its outcome's delivery; None if the outcome is not delivered."""
        return self._delivery

    @property
    def owes(self) -> bool:
        """Whether its outcome still has to be delivered."""
        return self._delivery is not None and self._delivery.state is DeliveryState.PENDING

    @property
    def undelivered(self) -> bool:
        """Whether the delivery of its outcome was given up. `Outbox.resend` can begin it again."""
        return self._delivery is not None and self._delivery.state in (DeliveryState.REFUSED, DeliveryState.EXPIRED)

    @property
    def received(self) -> bool:
        """Whether its caller has acknowledged its outcome, by a call or on a stream. `delivery` has whether its receiver did."""
        return self._received

    @property
    def is_restored(self) -> bool:
        """Whether an earlier process of the server accepted it."""
        return self._restored

    @property
    def is_suspended(self) -> bool:
        """Whether it stops without an end: the next process of the server continues it."""
        return self._suspended

    @property
    def held(self) -> bool:
        """Whether a consumer still has to see its end. Until `release` it is not dropped."""
        return bool(self._holders)

    @property
    def is_read(self) -> bool:
        """Whether the reward of its group is being computed: even after its end, its further models may be called."""
        return self.group is not None and self.group.rewarding

    @property
    def is_blocked(self) -> bool:
        """Whether it goes on only if something else happens first: its trainer completes a turn, or a slot becomes free.

        So does a rollout that waits for its group. One that is ending is not blocked until it has left its slot.
        """
        if not self._running:
            return not self.is_read
        return not (self.ending.is_requested or self.ending.is_reached) and self.activity.is_blocked

    @property
    def earlier_seconds(self) -> float:
        """How long it ran in earlier processes of the server; their downtime does not count."""
        return self._earlier_seconds

    def queued_ms(self) -> float:
        """Return the milliseconds for which it has waited for a slot, also in earlier processes of the server."""
        return 1000 * (self.clock.monotonic() - self._queued_at + self._queued_before)

    def record(self, record: Input) -> tuple[Record, ...]:
        """Apply a record to the machine and append the result to the log. Return all records that were logged.

        Nothing here awaits, so machine, log and owner never disagree when another task looks at them.
        """
        if self.replay is not None:
            if not isinstance(record, Ended):
                self.replay.defer(record)
                return (record,)
            unused, self.replay = self.replay, None
            unused.fast_forward()
        if isinstance(record, Ended):
            self._mask_unreceived()
            record = replace(record, policy_step=self.gate.step)
        logged = self.machine.accept(record)
        now = self.clock.monotonic() + self._to_wall
        if isinstance(record, Answered):
            self._cancel_if_stale()
        if isinstance(record, Ended):
            now = now if self.group is None else self.group.next_end(now)
            self._finished, self.ending.provisional = now, False
            self.capture.end()
            self._stop_detach_timer()
        conversation = self.machine.find(record)
        turn, segment = getattr(record, "turn", conversation.turn), conversation.line.segment
        entries = self.log.append(logged, now, turn, segment.id if segment is not None else "")
        self._owner.on_recorded(self, entries)
        if isinstance(record, Ended) and self.group is not None:
            self.group.on_recorded(self, record.end)
        if not self.log.is_abandoned:  # otherwise the journal has dropped it, and only its agent still has to end
            self._owner.journal.write(EntriesAppended(self.uid, entries), lambda: self._publish(entries))
        return logged

    def _mask_unreceived(self) -> None:
        """Mask the completions out that an agent of its own loop may not have received from an earlier process."""
        if self._restored:
            for turn in unreceived(self.machine, self.log.records):
                self.record(Masked(turn, UNSEEN))

    def is_noted(self, note: Note) -> bool:
        """Return whether an earlier process has recorded a note that the agent, which runs again, now repeats. Each counts once."""
        known = self._noted[note] > 0
        self._noted[note] -= known
        return known

    async def stored(self) -> None:
        """Wait until the journal has stored everything recorded so far."""
        await self._owner.journal.flush()

    def _publish(self, entries: Sequence[Entry]) -> None:
        self.log.publish(entries[-1].sequence)
        self._owner.on_published(self, entries)
        if self.log.is_over and self.group is not None:
            self.group.on_ended(self)

    def _restore(self, stored: StoredRollout) -> None:
        """Take over the state that the journal has."""
        self._received = stored.received
        entries, records = stored.entries, [entry.record for entry in stored.entries]
        if self.log.is_over:
            replay(self.machine, records)
            self._finished = entries[-1].time
            return
        live = goes_on_live(self.agent, records)
        replay(self.machine, records if live else records[:1])
        if len(entries) > 1:
            began = entries[1].time
            self._queued_before = max(0.0, began - self.created)
            self._earlier_seconds = running_seconds(entries[1:])
        if len(entries) > 1 and not live:
            self._noted = Counter(record for record in records if isinstance(record, Note) and record.code != RESAMPLED)
            self.replay = AgentReplay(self.machine, records[1:], self.ending.reach, self._on_replayed)

    def _on_replayed(self, deferred: Sequence[Input]) -> None:
        """Continue live, or end: the log of the earlier process is used up. `deferred` was to be recorded meanwhile."""
        ended, self.replay = self.replay is None, None
        if not ended:
            self.record(self.log.resumption)
        self._cancel_if_stale()
        self._owner.on_recorded(self, ())
        for record in deferred:
            self.record(record)

    def join(self, group: GroupMembership, *, provisional: bool, held: bool = True) -> None:
        """Join the group that it was started with. `provisional`: its end waits for the group's reward. `held`: see `hold`."""
        self.group, self.ending.provisional = group, provisional
        if held:
            self._holders.add(group)

    def announce(self, policy: AnnouncedPolicy) -> bool:
        """Take over what was announced about its policy. Return whether that cancels the rollout, because it is stale.

        An end that was requested and a failure that was reached are not changed.
        """
        if self.ending.is_final:
            return False
        self.gate.announce(policy)
        return self._cancel_if_stale()

    def expect_clients(self) -> None:
        """From now on clients can attach again to a rollout of an earlier process: start its `cancel_after_detach` timer."""
        if self._restored and self._detach_timer is None:  # otherwise one has been attached already, and has left
            self._start_detach_timer()

    def suspend(self) -> None:
        """Stop the run without an end, so that the next process of the server can continue it from the journal."""
        self._suspended = True
        self.ending.request(Failure(Category.INTERRUPTED, "suspended until the next start of the server"))

    def take_slot(self) -> None:
        """Mark it as running."""
        self._running = True

    def leave_slot(self) -> None:
        """Mark it as not running."""
        self._running = False
        self.activity.changed()

    def limit_time(self, seconds: float) -> None:
        """Set the deadline to `seconds` from now."""
        self._deadline = self.clock.monotonic() + seconds

    def update_credentials(self, by: Credentials) -> None:
        """Take over the tokens of `by`, unless no endpoint will be called any more."""
        if self.outcome is None or self.owes:
            self._set_credentials(self._credentials.updated(by))
        elif self.undelivered:
            self._set_credentials(Credentials(outcome=by.outcome or self._credentials.outcome))

    def drop_credentials(self) -> None:
        """Delete the credentials, except for that of an outcome that was not delivered: it may be sent again."""
        self._set_credentials(Credentials(outcome=self._credentials.outcome if self.undelivered else ""))

    def update_delivery(self, delivery: Delivery) -> None:
        """Set the state of the outcome's delivery."""
        self._delivery = delivery

    def mark_received(self) -> None:
        """Mark its outcome as acknowledged by its caller."""
        if not self._received:
            self._received = True
            self._owner.journal.write(OutcomeReceived(self.uid))

    def hold(self, by: object) -> None:
        """Keep it from being dropped until `release` by the same object. Called before it ends, or is restored after its end."""
        self._holders.add(by)

    def release(self, by: object) -> None:
        """End the hold of this object. Notify the owner if it was the last one."""
        if by in self._holders:
            self._holders.remove(by)
            if not self._holders:
                self._owner.on_released(self)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Count a client as attached. When the last one leaves, the `cancel_after_detach` timer starts (D6)."""
        self._attached += 1
        self._stop_detach_timer()
        try:
            yield
        finally:
            self._attached -= 1
            self._start_detach_timer()

    def _set_credentials(self, credentials: Credentials) -> None:
        if credentials != self._credentials:
            self._credentials = credentials
            self._owner.journal.write(CredentialsChanged(self.uid, credentials))

    def _cancel_if_stale(self) -> bool:
        """Request the end of the rollout if a token that trains is too old and its spec demands it. Return whether it did."""
        if isinstance(self.ending.end, Failure):
            return False
        newest = max(self.gate.step or 0, self.machine.newest_policy_step or 0)
        text = cancel_reason(self.spec.staleness, self.machine.oldest_policy_step, newest)
        if not text or not self.ending.request(Cancellation(text)):
            return False
        self.gate.close()
        return True

    def _start_detach_timer(self) -> None:
        grace = self.spec.cancel_after_detach
        if grace is None or self._attached or self.machine.outcome is not None:
            return
        self._detach_timer = asyncio.get_running_loop().call_later(grace, self.ending.request, Cancellation("detached"))

    def _stop_detach_timer(self) -> None:
        if self._detach_timer is not None:
            self._detach_timer.cancel()
            self._detach_timer = None
